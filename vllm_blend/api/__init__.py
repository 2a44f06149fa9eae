"""Using blending from a script: ``Blender``, load control, the embedded model."""

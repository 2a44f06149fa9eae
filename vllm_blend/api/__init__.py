"""Using blending: from a script (``Blender``, load control, the embedded model), and from a client of a
blending server by LangChain and LlamaIndex, which need neither vLLM nor torch."""

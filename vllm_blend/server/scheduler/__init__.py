"""In the engine's process: requests get their plans."""

"""What this package knows of vLLM's private parts, and of what an engine must be like."""

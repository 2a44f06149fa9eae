"""For clients of a blending server: LangChain and LlamaIndex. Nothing here needs vLLM or torch."""

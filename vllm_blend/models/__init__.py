"""Patched model classes: vLLM's own, with the blend path added around their layers."""

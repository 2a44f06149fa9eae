"""What ``vllm-blend doctor`` looks at, a file for each kind of check."""

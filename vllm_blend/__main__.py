"""``python -m vllm_blend``: the command ``vllm-blend``."""

from vllm_blend.cli.app import main

if __name__ == "__main__":
    main()

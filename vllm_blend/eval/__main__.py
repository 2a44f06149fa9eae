from vllm_blend.eval.cli import main

main()

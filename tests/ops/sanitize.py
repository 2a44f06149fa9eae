"""Every kernel once at odd sizes, against its oracle: small enough for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/ops/sanitize.py    # make sanitize: racecheck too

Each tensor is an allocation of its own, so that memcheck sees accesses beyond it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parents[1] / "helpers"),
    str(Path(__file__).parents[2]),
]

import test_received_attention  # noqa: E402
import test_segment_scatter  # noqa: E402
import test_shift_scatter  # noqa: E402
import test_sparse_attention  # noqa: E402
import test_widen  # noqa: E402
import torch  # noqa: E402

from vllm_blend.ops import library  # noqa: E402
from vllm_blend.ops.deviation import deviation, deviation_oracle  # noqa: E402
from vllm_blend.ops.sparse_attention import sparse_attention, sparse_attention_rest  # noqa: E402

DEVICE = torch.device("cuda")
SHAPES = [(8, 128, 128, torch.bfloat16, True), (3, 80, 40, torch.float16, False)]


def moves() -> None:
    """The ops with more than one implementation."""
    for num_kv_heads, head_size, rotary_dim, dtype, neox in SHAPES:
        shape = (num_kv_heads, head_size, rotary_dim)
        for num_tokens in (1, 19, 99):
            args = test_shift_scatter.case(DEVICE, num_tokens, dtype, *shape)
            test_shift_scatter.check_against_the_oracle(args, neox)
            stored = torch.randn(2, num_tokens, num_kv_heads, head_size, device=DEVICE).to(dtype)
            expected = deviation_oracle(stored[0], stored[1])
            torch.testing.assert_close(deviation(stored[0], stored[1]), expected, rtol=1e-5, atol=0)
            counts = test_segment_scatter.COUNTS[num_tokens]
            case = test_segment_scatter.Case(DEVICE, counts, dtype, shape, "mixed")
            before = case.before()
            case.run(is_neox_style=neox, num_programs=3)
            case.check(before, neox)


def widening() -> None:
    for size in test_widen.SIZES:
        test_widen.check_against_the_oracle(size, torch.bfloat16, DEVICE)


def attention() -> None:
    length = 99
    rows = [test_sparse_attention.scattered(19, length), [0], [], list(range(30, 49))]
    for heads in ((8, 2, 128), (6, 2, 80)):
        plain = test_sparse_attention.case(DEVICE, rows, torch.float16, *heads)
        for options in ({}, *test_sparse_attention.OPTIONS):
            args = test_sparse_attention.with_options(plain, **options)
            test_sparse_attention.assert_close(sparse_attention(**args), args)
            if args.pop("sliding_window", 0):
                continue
            lse = torch.zeros(heads[0], args["query"].shape[0], device=DEVICE)
            out = torch.zeros_like(args["query"])
            sparse_attention_rest(**args, out=out, prefix_lse=lse)
        last_keys = test_received_attention.last_keys_of(19, 999)
        for options in ({}, *test_received_attention.OPTIONS):
            asked = test_received_attention.case(DEVICE, last_keys, torch.float16, *heads, num_layers=2)
            asked = test_received_attention.with_options(asked, **options)
            test_received_attention.check_against_the_oracle(asked)


def main() -> None:
    torch.manual_seed(0)
    for name in library.implementations():
        with library.implementation(name):
            moves()
    widening()
    attention()
    torch.cuda.synchronize()
    print(f"sanitize: {', '.join(library.implementations())}, widening and attention ran")


if __name__ == "__main__":
    main()

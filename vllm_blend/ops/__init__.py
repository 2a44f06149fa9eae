"""The kernels of blending: one noun a file, with its fp32 oracle, its checks and its Triton kernel.

``sparse_attention``      queries at explicit positions over the paged cache
``received_attention``    what each key receives of some queries' attention
``shift_scatter``         stored K, rotated to its place, and V into the paged cache
``segment_scatter``       the same for many chunks, read where they lie, in a launch graphs can hold
``widen``                 KV kept in eight bits, in the model's type
``deviation``             squared distance of fresh to stored V, per token

On a GPU the three that move data run their CUDA C++ kernels (csrc/) where those are built, else their
Triton kernels. On a CPU the functions run their oracles, or, in Triton's interpreter
(``TRITON_INTERPRET=1``), the Triton kernels themselves.
"""

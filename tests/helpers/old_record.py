"""Records of version 1, written as the first version's software wrote them, without its code."""

from __future__ import annotations

import json
import struct

from blake3 import blake3

from vllm_blend.core.kv import StoredKV
from vllm_blend.store.keys import ChunkKey

NAMES = {4: "F32", 2: "F16"}


def old_record(key: ChunkKey, kv: StoredKV) -> bytes:
    """Of KV in float32 or float16 that is kept as it is computed."""
    num_layers, num_tokens = len(kv.layers), key.num_tokens
    arrays = [[tensor.numpy() for tensor in layer] for layer in kv.layers]
    header: dict[str, object] = {
        "__metadata__": {"format": "vllm_blend chunk KV", "version": "1", "key": key.digest.hex()}
    }
    small = 4 * num_tokens + 16 * num_layers
    header["token_ids"] = {"dtype": "I32", "shape": [num_tokens], "data_offsets": [0, 4 * num_tokens]}
    header["checksums"] = {
        "dtype": "U8",
        "shape": [num_layers, 16],
        "data_offsets": [4 * num_tokens, small],
    }
    end = small
    for number, layer in enumerate(arrays):
        for kind, array in zip("kv", layer, strict=True):
            start, end = end, end + array.nbytes
            header[f"layers.{number}.{kind}"] = {
                "dtype": NAMES[array.itemsize],
                "shape": list(array.shape),
                "data_offsets": [start, end],
            }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text) + small) % 4096)
    data = [layer[0].tobytes() + layer[1].tobytes() for layer in arrays]
    sums = [
        blake3(key.digest + struct.pack("<I", number) + part).digest(16)
        for number, part in enumerate(data)
    ]
    ids = struct.pack(f"<{num_tokens}i", *key.token_ids)
    return b"".join([struct.pack("<Q", len(text)), text, ids, *sums, *data])

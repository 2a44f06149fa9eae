"""A model's identity from its files, in well under a second, and from an engine's configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3

from vllm_blend.core.kv import KVShape
from vllm_blend.store.keys import ModelKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SAMPLE_BYTES = 4096
"""Read from the start and the middle of every tensor."""

SAMPLES = 64
"""Values of a parameter in memory that are read one by one."""

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their size in bytes."""

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def weights_fingerprint(model: Path) -> str:
    """Digest of a model's weights: file names, sizes, headers and a sample of every tensor.

    A tensor changed in part, outside of the sampled bytes, is not seen; whoever edits weights in that
    way gives the copy another ``salt``.

    Args:
        model: a folder with weights, or one file of weights.

    Returns:
        32 hexadecimal digits.

    Raises:
        FileNotFoundError: if there are no weights.
    """
    files = [model] if model.is_file() else _weight_files(model)
    if not files:
        raise FileNotFoundError(f"{model} has no weights ({', '.join(WEIGHTS)})")
    hasher = blake3()
    for path in files:
        size = path.stat().st_size
        hasher.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for offset in _sample_offsets(path, size, hasher):
                hasher.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return hasher.hexdigest(16)


def parameters_digest(model: torch.nn.Module) -> str:
    """Digest of a model's parameters as they are in memory, computed where they are.

    Of each parameter the sum of all its bits read as whole numbers, that of every other column, and a
    sample of its values. So it is no more than a sum over memory, and what training changes is seen.

    Returns:
        32 hexadecimal digits.
    """
    hasher = blake3()
    sums: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        hasher.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{tensor.device.type};".encode())
        if tensor.is_meta or not tensor.numel():
            continue  # it is being replaced
        bits = tensor.view(WHOLE[tensor.itemsize])
        sample = bits.reshape(-1)[:: max(1, bits.numel() // SAMPLES)][:SAMPLES]
        sums += [bits.sum(dtype=torch.int64)[None], bits[..., ::2].sum(dtype=torch.int64)[None]]
        sums.append(sample.to(torch.int64))
    if sums:
        hasher.update(torch.cat([one.to(sums[0].device) for one in sums]).cpu().numpy().tobytes())
    return hasher.hexdigest(16)


def _weight_files(folder: Path) -> list[Path]:
    """The files of the first kind that is there, as vLLM prefers safetensors over the others."""
    for pattern in WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def _sample_offsets(path: Path, size: int, hasher: Any) -> Iterator[int]:
    """Where to read; a safetensors header goes into ``hasher`` whole."""
    if path.suffix != ".safetensors":
        step = max(size // 4096, SAMPLE_BYTES)
        yield from range(0, size, step)
        return
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, size))
    hasher.update(header)
    for name, tensor in json.loads(header).items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in tensor["data_offsets"])
            yield start
            yield (start + end) // 2


def model_key(
    vllm_config: VllmConfig,
    shape: KVShape,
    tp_rank: int = 0,
    storage: str = "auto",
    checksum_key: bytes = b"",
    first_layer: int = 0,
) -> ModelKey:
    """The key of an engine's model.

    Args:
        vllm_config: the engine's.
        shape: of the KV of one rank.
        tp_rank: which one.
        storage, checksum_key: the store's.
        first_layer: of the rank's pipeline stage.

    Raises:
        FileNotFoundError: if the weights are not on this machine.
    """
    model = vllm_config.model_config
    config = _stable(model.hf_config.to_dict())
    if vllm_config.load_config.load_format == "dummy":  # random weights: the seed says which
        weights = f"dummy seed {model.seed}"
    else:
        weights = weights_fingerprint(local_folder(model.model, model.revision))
    text = json.dumps([weights, config], sort_keys=True, default=str)
    rope = {name: value for name, value in config.items() if "rope" in name or "max_position" in name}
    return ModelKey(
        weights=blake3(text.encode()).hexdigest(16),
        rope=json.dumps(rope, sort_keys=True, default=str),
        shape=shape,
        kv_dtype=f"{shape.dtype}, cache {vllm_config.cache_config.cache_dtype}",
        quantization=str(model.quantization or ""),
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        tp_rank=tp_rank,
        first_layer=first_layer,
        storage=storage,
        checksum_key=checksum_key,
    )


def _stable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what says where it lies or who wrote it."""
    return {
        name: value
        for name, value in config.items()
        if not name.startswith("_") and name != "transformers_version"
    }


def local_folder(model: str, revision: str | None) -> Path:
    """A folder, or that of a name whose files are on this machine."""
    if os.path.exists(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))

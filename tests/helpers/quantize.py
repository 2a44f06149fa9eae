"""A small model's weights quantized on the spot, in the format of compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

GROUP = 32


def int4_model(model: Path, folder: Path) -> Path:
    """The Llama in ``model`` with linear weights in four bits, a scale for each ``GROUP`` inputs."""
    weights = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    return _write(model, folder, "pack-quantized", dict(weights=weights), _int4)


def int8_model(model: Path, folder: Path) -> Path:
    """The same in eight bits, a scale for each output; inputs in eight bits, a scale for each token."""
    weights = dict(num_bits=8, type="int", symmetric=True, strategy="channel")
    inputs = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    scheme = dict(weights=weights, input_activations=inputs)
    return _write(model, folder, "int-quantized", scheme, _int8)


def _int4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    rows, columns = weight.shape
    groups = weight.view(rows, columns // GROUP, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    values = (groups / scale).round().clamp(-8, 7).to(torch.int8).view(rows, columns)
    return {
        f"{name}_packed": pack_to_int32(values, 4),
        f"{name}_scale": scale[..., 0].contiguous(),
        f"{name}_shape": torch.tensor([rows, columns]),
    }


def _int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(-1, keepdim=True) / 127
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def _write(model: Path, folder: Path, form: str, scheme: dict[str, Any], quantize: Any) -> Path:
    from safetensors.torch import load_file, save_file

    found: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        is_linear = name.endswith("proj.weight")
        found |= quantize(name, weight) if is_linear else {name: weight}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = dict(
        quant_method="compressed-tensors",
        format=form,
        quantization_status="compressed",
        config_groups={"group_0": dict(targets=["Linear"]) | scheme},
        ignore=["lm_head"],
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder

"""A small model's weights quantized on the spot, in the formats that vLLM loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GROUP = 32
"""Inputs that share a scale, in four bits."""

Quantize = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""Tensors of a linear layer, from its name and its weight ``[outputs, inputs]``."""


def int4_model(model: Path, folder: Path) -> Path:
    """The Llama in ``model`` with linear weights in four bits, as compressed-tensors keeps them."""
    weights = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    return _write(model, folder, _compressed("pack-quantized", dict(weights=weights)), _int4)


def int8_model(model: Path, folder: Path) -> Path:
    """The same in eight bits, a scale for each output; inputs in eight bits, a scale for each token."""
    weights = dict(num_bits=8, type="int", symmetric=True, strategy="channel")
    inputs = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    scheme = dict(weights=weights, input_activations=inputs)
    return _write(model, folder, _compressed("int-quantized", scheme), _int8)


def awq_model(model: Path, folder: Path) -> Path:
    """The same in four bits with zero points, in AWQ's format (its search for scales left out)."""
    config = dict(quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm")
    return _write(model, folder, config, _awq)


def gptq_model(model: Path, folder: Path) -> Path:
    """The same in four bits, in GPTQ's format (each weight rounded by itself)."""
    config = dict(
        quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=True, lm_head=False
    )
    return _write(model, folder, config, _gptq)


def fp8_model(model: Path, folder: Path) -> Path:
    """The same in e4m3, a scale for each weight; inputs in e4m3 too, scaled as they come."""
    return _write(model, folder, dict(quant_method="fp8", activation_scheme="dynamic"), _fp8)


def _int4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values, scale = _groups(weight)
    return {
        f"{name}_packed": pack_to_int32(values.to(torch.int8), 4),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(weight.shape),
    }


def _int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(-1, keepdim=True) / 127
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def _fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def _awq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Numbers 0 to 15, ``[inputs, outputs]``, eight outputs in an int32 in AWQ's order."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // GROUP, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    values = ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, 15).view(rows, columns)
    order, module = (0, 2, 4, 6, 1, 3, 5, 7), name.removesuffix(".weight")

    def packed(numbers: torch.Tensor) -> torch.Tensor:
        return _packed(numbers.t().unflatten(1, (-1, 8))[..., order])

    return {
        f"{module}.qweight": packed(values),
        f"{module}.qzeros": packed(zero),
        f"{module}.scales": scale.t().half().contiguous(),
    }


def _gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Numbers 0 to 15 around 8, ``[inputs, outputs]``, eight inputs in an int32."""
    values, scale = _groups(weight)
    module, columns = name.removesuffix(".weight"), weight.shape[1]
    zeros = torch.full((columns // GROUP, weight.shape[0] // 8, 8), 7)  # one less, in this format
    return {
        f"{module}.qweight": _packed((values + 8).unflatten(1, (-1, 8))).t().contiguous(),
        f"{module}.qzeros": _packed(zeros),
        f"{module}.scales": scale.t().half().contiguous(),
        f"{module}.g_idx": (torch.arange(columns) // GROUP).to(torch.int32),
    }


def _groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers -8 to 7, ``[outputs, inputs]``, and scales ``[outputs, groups]``."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // GROUP, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    return (groups / scale).round().clamp(-8, 7).view(rows, columns), scale[..., 0].contiguous()


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Eight numbers of four bits in an int32, the first one lowest: ``[..., 8]`` to ``[...]``."""
    shifted = numbers.to(torch.int64) << (4 * torch.arange(8))
    return shifted.sum(-1).to(torch.int32).contiguous()  # the highest bit becomes the sign


def _compressed(form: str, scheme: dict[str, Any]) -> dict[str, Any]:
    """The configuration of compressed-tensors."""
    return dict(
        quant_method="compressed-tensors",
        format=form,
        quantization_status="compressed",
        config_groups={"group_0": dict(targets=["Linear"]) | scheme},
        ignore=["lm_head"],
    )


def _write(model: Path, folder: Path, config: dict[str, Any], quantize: Quantize) -> Path:
    """The model with its linear weights quantized; the tokenizer's files beside it."""
    from safetensors.torch import load_file, save_file

    found: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        is_linear = name.endswith("proj.weight")
        found |= quantize(name, weight.float()) if is_linear else {name: weight}
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((model / "config.json").read_text()) | dict(quantization_config=config)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


FORMATS: dict[str, Callable[[Path, Path], Path]] = {
    "int4 (compressed-tensors)": int4_model,
    "int8 (compressed-tensors)": int8_model,
    "int4 (AWQ)": awq_model,
    "int4 (GPTQ)": gptq_model,
    "fp8": fp8_model,
}
"""By name; each takes the model's folder and the one to write to."""

"""What the probes found of models, kept in vLLM's cache folder (``probe.py`` writes it)."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_blend.compat.version import package_version, vllm_version
from vllm_blend.core import pipeline, tensor_parallel

if TYPE_CHECKING:
    from vllm_blend.model.blending import Blending

logger = logging.getLogger("vllm.vllm_blend")

PROBE_VERSION = 3
"""Of what is kept; a new one probes every model again."""

ABOUT = "about"
"""The key of a kept verdict that says of what it is."""


@dataclass(frozen=True)
class Verdict:
    """What the probes found.

    Attributes:
        refused: why the model cannot blend, or "".
        rotations: of each layer, which of the rotations that it may have; -1: its K does not depend on
            its position.
        shift_error: relative error of the question's hidden states, the median of its tokens.
        identity_error, control_error: of the last hidden state.
    """

    refused: str = ""
    rotations: tuple[int, ...] = ()
    shift_error: float = 0.0
    identity_error: float = 0.0
    control_error: float = 0.0

    def __str__(self) -> str:
        rope = sum(index >= 0 for index in self.rotations)
        return (
            f"{rope} layers with RoPE, {len(self.rotations) - rope} without; the "
            f"last hidden state moves by {self.shift_error:.1g} with shifted positions, by "
            f"{self.identity_error:.1g} with exact KV at random rows, by {self.control_error:.1g} with "
            "wrong KV"
        )


def read_verdict(path: Path) -> tuple[dict[str, str], Verdict]:
    """A kept verdict, and of which engine it is; empty where the file does not tell.

    Raises:
        OSError, ValueError, TypeError, KeyError: it cannot be read, or is no verdict.
    """
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
        raise TypeError(f"{path} holds no verdict")
    about: dict[str, str] = values.pop(ABOUT, {})
    return about, Verdict(**values | {"rotations": tuple(values["rotations"])})


def verdicts_folder() -> Path:
    """Where verdicts are kept."""
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT) / "vllm_blend" / "probes"


def kept_verdicts(model_config: Any) -> list[tuple[dict[str, str], Verdict]]:
    """What was found of this model before, by engines of this version, the latest first; and of which
    (``about``).

    Args:
        model_config: vLLM's.
    """
    found = []
    for path in verdicts_folder().glob("*.json"):
        try:
            about, verdict = read_verdict(path)
            if about["model"] == model_digest(model_config) and about["version"] == package_version():
                found.append((path.stat().st_mtime, about, verdict))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return [(about, verdict) for _, about, verdict in sorted(found, key=lambda one: -one[0])]


def model_digest(model_config: Any) -> str:
    """Of a model's configuration."""
    text: str = model_config.hf_config.to_json_string(use_diff=False)
    return sha256(text.encode()).hexdigest()[:32]


def about(blending: Blending) -> dict[str, str]:
    """Of which engine a verdict is, for whoever has no engine."""
    config = blending.vllm_config
    return {
        "model": model_digest(config.model_config),
        "version": package_version(),
        "vllm": vllm_version() or "",
        "dtype": str(config.model_config.dtype),
        "backends": ", ".join(_backends(blending)),
        "ranks": _ranks(),
    }


def verdict_path(blending: Blending) -> Path:
    """Where an engine's verdict is kept: by everything that it may depend on."""
    config = blending.vllm_config
    model = config.model_config
    said = [
        PROBE_VERSION,
        package_version(),
        vllm_version(),
        model.hf_config.to_json_string(use_diff=False),
        str(model.dtype),
        str(config.cache_config.cache_dtype),
        model.max_model_len,
        str(model.quantization),
        tensor_parallel.num_ranks(),
        *([] if pipeline.num_stages() == 1 else [pipeline.num_stages(), pipeline.stage()]),
        _backends(blending),
        str(config.compilation_config.mode),
        type(blending.inner).__name__,
    ]
    digest = sha256(json.dumps(said, default=str).encode()).hexdigest()[:32]
    return verdicts_folder() / f"{digest}.json"


def write_verdict(path: Path, verdict: Verdict, of: dict[str, str] | None = None) -> None:
    """Keeps a verdict; a folder that cannot be written to is no error.

    Args:
        of: which engine it is of (``about``).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{id(verdict)}")
        part.write_text(json.dumps(asdict(verdict) | {ABOUT: of or {}}))
        part.replace(path)
    except OSError as error:
        logger.warning("vllm_blend: what the probes found could not be kept: %s", error)


def _backends(blending: Blending) -> list[str]:
    return sorted({attn.attn_backend.get_name() for attn in blending.attns})


def _ranks() -> str:
    """Of how many this is one, for a reader."""
    ranks, stages = str(tensor_parallel.num_ranks()), pipeline.num_stages()
    return ranks if stages == 1 else f"{ranks}, stage {pipeline.stage() + 1} of {stages}"

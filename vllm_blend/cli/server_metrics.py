"""What a server counts (``/metrics``), summed over its engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

OWN = "vllm:blend_"
TTFT = "vllm:time_to_first_token_seconds"
REQUESTS = ("blended", "cached", "full_prefill")
CHUNKS = ("hit", "cached", "miss", "short")
STAGES = ("lookup", "wait", "load", "select", "fuse")


@dataclass(frozen=True)
class ServerMetrics:
    """Values by a sample's name and its labels, but for those of histograms' buckets."""

    values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

    @classmethod
    def read(cls, text: str) -> ServerMetrics:
        """Of ``/metrics``' text; raises ValueError where it is none."""
        found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_created")):
                    continue
                found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return cls(found)

    def since(self, before: ServerMetrics) -> ServerMetrics:
        """What counters grew by since then; of gauges it says nothing that is of use."""
        return ServerMetrics(
            {key: value - before.values.get(key, 0.0) for key, value in self.values.items()}
        )

    @property
    def blends(self) -> bool:
        """Whether any request that may blend was counted."""
        return any(name.startswith(OWN) for name, _ in self.values)

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels."""
        wanted = set(labels.items())
        return sum(v for (own, has), v in self.values.items() if own == name and wanted <= set(has))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by a label's values, the values that are 0 left out."""
        found: dict[str, float] = {}
        for (own, labels), value in self.values.items():
            if own == name and value and (key := dict(labels).get(label)) is not None:
                found[key] = found.get(key, 0.0) + value
        return found

    def mean(self, name: str) -> float | None:
        """Of a histogram; None: nothing was observed."""
        count = self.total(f"{name}_count")
        return self.total(f"{name}_sum") / count if count else None


def reuse(metrics: ServerMetrics) -> dict[str, Any]:
    """What became of chunks and tokens, in the requests that asked for blending."""
    requests = metrics.by(f"{OWN}requests_total", "result")
    chunks = metrics.by(f"{OWN}chunks_total", "result")
    tokens = metrics.by(f"{OWN}prompt_tokens_total", "source")
    recomputed = metrics.total(f"{OWN}recomputed_tokens_total")
    prompt = sum(tokens.values())
    computed = tokens.get("fresh", 0.0) + recomputed
    there = chunks.get("hit", 0.0) + chunks.get("cached", 0.0)
    return {
        "requests": {name: int(requests.get(name, 0)) for name in REQUESTS},
        "chunks": {name: int(chunks.get(name, 0)) for name in CHUNKS},
        "hit_rate": there / max(sum(chunks.values()), 1.0),
        "prompt_tokens": int(prompt),
        "reused_share": tokens.get("reused", 0.0) / max(prompt, 1.0),
        "prefix_cached_share": tokens.get("cached", 0.0) / max(prompt, 1.0),
        "recomputed_share": recomputed / max(prompt, 1.0),
        "computed_tokens": int(computed),
    }

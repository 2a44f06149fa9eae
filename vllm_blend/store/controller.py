"""The loading controller: load or recompute, at which ratio, and from which storage.

It works on two estimates: how long a load takes, by tier, learned from loads (``load_time.py``),
and how long a prefill that computes some of its tokens takes, measured (``compute_time.py``).
The idea is the CacheBlend paper's (arXiv 2405.16444, section 5.1): while KV is loaded there is time to
recompute; what hides behind the load costs nothing and helps quality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations

from vllm_blend.store.compute_time import ComputeTime
from vllm_blend.store.load_time import LoadTime

FLOOR = 0.15
"""Below this share of recomputed tokens quality suffers (the paper's figure 16); per model."""
HIDE = 0.8
"""Share of a load that recomputation may fill: the two disturb each other, and machines get busier."""
MAX_SEARCHED = 32
"""Chunks of a request among which sets are searched, in 7 ms; of 256 that would take 2 s, and nobody is
served meanwhile."""


@dataclass(frozen=True)
class Located:
    """A chunk of a request and where its KV is; ``tier`` None: nowhere, or on the GPU already if
    ``num_bytes`` is 0."""

    num_tokens: int
    num_bytes: int
    tier: str | None


@dataclass(frozen=True)
class Decision:
    """What to do with a request.

    Attributes:
        ratio: share of the loaded chunks' tokens to recompute.
        load: for each chunk, whether to load it; the others are computed like the question.
        ttft_s, load_s, compute_s: expected; with overlap the first is little more than the larger one.
        reason: why, in words.
    """

    ratio: float
    load: tuple[bool, ...]
    ttft_s: float
    load_s: float
    compute_s: float
    reason: str


class Controller:
    """Decides, for each request, what to load and how much to recompute.

    Args:
        compute: measured at warm-up.
        loads: by tier; the store's lanes have them (``lane.load_time``).
        num_layers: of the model; the first layer's load is not hidden.
        floor: no ratio below it.
        full: of prefills that reuse nothing, where they run otherwise than blended ones at ratio 1.
        hide: the share of a load's time that recomputation may fill; the rest is for what the
            estimates do not know.
        overlap: whether layers are loaded while earlier ones are computed (``get(layerwise=True)``).
    """

    def __init__(
        self,
        compute: ComputeTime,
        loads: Mapping[str, LoadTime],
        num_layers: int,
        *,
        floor: float = FLOOR,
        overlap: bool = True,
        full: ComputeTime | None = None,
        hide: float = 1.0,
    ) -> None:
        for name, value in (("floor", floor), ("hide", hide)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; allowed: 0 to 1")
        self.compute = compute
        self.full = full or compute
        self.hide = hide
        self.loads = loads
        self.num_layers = num_layers
        self.floor = floor
        self.overlap = overlap

    def decide(self, chunks: Sequence[Located], num_other_tokens: int) -> Decision:
        """The choice with the least time to first token, and then the highest ratio that costs none.

        Up to 8 chunks every set is tried. Of more, the slowest (seconds of load for a token) are the
        first to be computed instead; then, up to MAX_SEARCHED chunks, single ones change sides, or
        places, while that helps.

        Args:
            num_other_tokens: head and question, computed in any case.
        """
        there = [i for i, chunk in enumerate(chunks) if not self._absent(chunk)]

        def plan(loaded: Iterable[int]) -> Decision:
            return self._plan(chunks, frozenset(loaded), num_other_tokens)

        full = plan(())
        if len(there) <= 8:
            sets = (some for size in range(len(there) + 1) for some in combinations(there, size))
            best = min(map(plan, sets), key=_rank)
        else:
            best = self._search(there, [self._pace(chunk) for chunk in chunks], plan)
        if not any(best.load):
            return best
        share = f"load takes {_ms(best.load_s)}, computing {_ms(best.compute_s)}"
        left_out = len(there) - sum(best.load)
        why = [share]
        if best.ratio > self.floor:
            why.append(f"ratio {best.ratio:.2f} hides behind the load")
        else:
            why.append(f"ratio {best.ratio:.2f} is the quality floor")
        if left_out:
            why.append(f"{left_out} chunks are faster computed than loaded")
        why.append(f"full prefill would take {_ms(full.ttft_s)}")
        return Decision(best.ratio, best.load, best.ttft_s, best.load_s, best.compute_s, "; ".join(why))

    @staticmethod
    def _search(
        there: Sequence[int], pace: Sequence[float], plan: Callable[[Iterable[int]], Decision]
    ) -> Decision:
        order = sorted(there, key=lambda i: pace[i])
        step = -(-len(order) // MAX_SEARCHED)
        counts = [*range(0, len(order), step), len(order)]
        best = min((plan(order[:count]) for count in counts), key=_rank)
        if len(there) > MAX_SEARCHED:
            return best
        for _ in there:
            loaded = {i for i, load in enumerate(best.load) if load}
            near = [loaded ^ {i} for i in there]
            near += [loaded ^ {i, j} for i in loaded for j in set(there) - loaded]
            found = min(map(plan, near), key=_rank)
            if _rank(found) >= _rank(best):
                break
            best = found
        return best

    def ttft(self, load_s: float, compute_s: float) -> float:
        """Expected time of a request whose load and computation take so long by themselves."""
        if not self.overlap:
            return load_s + compute_s
        return max(load_s, compute_s) + min(load_s, compute_s) / self.num_layers

    def _absent(self, chunk: Located) -> bool:
        return chunk.tier is None and chunk.num_bytes > 0

    def _pace(self, chunk: Located) -> float:
        """Seconds of load for a token that need not be computed."""
        if chunk.tier is None:
            return 0.0
        return self.loads[chunk.tier].seconds(chunk.num_bytes) / chunk.num_tokens

    def _load_s(self, chunks: Sequence[Located], loaded: Set[int]) -> float:
        """Tiers are read at the same time; a tier's chunks one after the other."""
        by_tier: dict[str, float] = {}
        for i in loaded:
            tier, num_bytes = chunks[i].tier, chunks[i].num_bytes
            if tier is not None:
                by_tier[tier] = by_tier.get(tier, 0.0) + self.loads[tier].seconds(num_bytes)
        return max(by_tier.values(), default=0.0)

    def _plan(self, chunks: Sequence[Located], loaded: Set[int], num_other: int) -> Decision:
        reused = sum(chunks[i].num_tokens for i in loaded)
        total = sum(chunk.num_tokens for chunk in chunks) + num_other
        load_s = self._load_s(chunks, loaded)
        flags = tuple(i in loaded for i in range(len(chunks)))
        if not reused:
            compute_s = self.full.seconds(total, total)
            reason = f"full prefill takes {_ms(compute_s)}; no load is faster"
            return Decision(1.0, flags, compute_s, 0.0, compute_s, reason)
        ratio = self.floor
        if self.overlap:
            rows = self.compute.rows_in(self.hide * load_s, total) - (total - reused)
            ratio = min(max(rows / reused, self.floor), 1.0)
        compute_s = self.compute.seconds(total, total - reused + ratio * reused)
        return Decision(ratio, flags, self.ttft(load_s, compute_s), load_s, compute_s, "")


@dataclass(frozen=True)
class Offer:
    """Storage that could hold the chunks; the price in any currency, for a GB and month."""

    name: str
    load: LoadTime
    price: float


@dataclass(frozen=True)
class Recommendation:
    """Attributes: ``offer``, its expected TTFT and the price of all bytes for a month, and why."""

    offer: Offer
    ttft_s: float
    price: float
    reason: str


def recommend(
    offers: Sequence[Offer],
    controller: Controller,
    *,
    num_tokens: int,
    num_other_tokens: int,
    bytes_per_token: int,
    stored_tokens: int,
    target_s: float | None = None,
) -> Recommendation:
    """The cheapest storage that is fast enough (the paper's storage choice).

    Args:
        num_tokens: of the chunks of a typical request.
        num_other_tokens: its head and question.
        stored_tokens: of all chunks that are to be kept.
        target_s: time to first token to reach; None: that of the quality floor with KV at hand, so
            that the load is hidden, within 5%.

    Raises:
        ValueError: if there are no offers.
    """
    if not offers:
        raise ValueError("offers is empty; name at least one storage")
    total = num_tokens + num_other_tokens
    at_hand = controller.compute.seconds(total, num_other_tokens + controller.floor * num_tokens)
    target = 1.05 * at_hand if target_s is None else target_s
    stored_gb = stored_tokens * bytes_per_token / 1e9

    def ttft(offer: Offer) -> float:
        return controller.ttft(offer.load.seconds(num_tokens * bytes_per_token), at_hand)

    enough = [offer for offer in offers if ttft(offer) <= target]
    if enough:
        best = min(enough, key=lambda offer: (offer.price, ttft(offer)))
        dearer = len(enough) - 1
        reason = f"the cheapest within {_ms(target)}; {dearer} others are fast enough and dearer"
    else:
        best = min(offers, key=lambda offer: (ttft(offer), offer.price))
        reason = f"none is within {_ms(target)}; this is the fastest"
    return Recommendation(best, ttft(best), stored_gb * best.price, f"{best.name}: {reason}")


def _rank(decision: Decision) -> tuple[float, int]:
    return decision.ttft_s, -sum(decision.load)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"

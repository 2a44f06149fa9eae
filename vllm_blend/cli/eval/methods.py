"""Ways to answer a question over passages; each has a name that says all of it.

``full``          full prefill of every token: what the others are compared with
``prefix``        full prefill with vLLM's prefix cache, which holds the prompt's head and first chunk
``reuse``         stored KV of every chunk, nothing recomputed (the same as ``hkvd@0``)
``POLICY@RATIO``  blending, e.g. ``hkvd@0.16``; further settings follow after colons:
                  ``hkvd@0.16:mask=bottom_right``, ``hkvd@0.16:check_layers=1,8:recomp_ratios=0.3,0.16``
``...:known=``    with stored KV of this share of the chunks, evenly among them; the others are new
``...:behind=``   last: with chunks computed after something else than the prompt's head: ``nothing``,
                  ``bos``, ``another`` (an instruction that is not the prompt's), ``before`` (the head,
                  then the 128 tokens before it in its passage); or a prompt's first chunk after the
                  head, and the others after the head and a text of these: ``others`` (512 tokens of
                  another example's passages, as a stand-in), ``text`` (512 tokens of a text of our own,
                  the stand-in by default), ``harvested`` (as many of another example's chunks as stand
                  before it here, or all if there are fewer: as if its KV were kept of a prompt that had
                  it at this place)
``mapreduce``     an answer from each chunk alone, then one from these answers
``maprerank``     an answer from each chunk alone; the one that the model is surest of

Where a method has the policy ``static``, alone or in a product, each chunk is computed in two contexts,
for its tokens' scores: after what the method says, and after the head alone; one that is after the
head alone anyway, after the head and the text of our own. All methods of a run share them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_blend.core.settings import BlendSettings, check_ratio

PLAIN = ("full", "prefix", "mapreduce", "maprerank")

BEHIND: dict[str, str] = {
    "nothing": "",
    "bos": "",
    "another": "Here are some texts. Read them, and do what is asked at the end.",
    "before": "",
    "others": "",
    "text": "",
    "harvested": "",
}
"""What else chunks are computed after; ``runner.py`` fills in what is empty here."""

OVERLAP = 128
"""Tokens of a chunk's passage that it is computed after, with ``:behind=before``."""
OTHERS = ("others", "harvested")
"""Those that need another example."""
STAND_IN = 512
"""Tokens of another example that it is computed after, with ``:behind=others``."""

_VALUES: dict[str, Callable[[str], Any]] = {
    "mask": str,
    "seed": int,
    "check_layers": lambda text: tuple(int(part) for part in text.split(",")),
    "recomp_ratios": lambda text: tuple(float(part) for part in text.split(",")),
}


def split_behind(name: str) -> tuple[str, str | None]:
    """A method's name without its ``:behind=`` part, and that part; None: after the prompt's head.

    Raises:
        ValueError: names the head that is not known.
    """
    name, _, behind = name.partition(":behind=")
    if behind and behind not in BEHIND:
        raise ValueError(f"behind is {behind!r}; allowed at a method's end: {', '.join(BEHIND)}")
    return name, behind or None


def known_share(name: str) -> float:
    """The share of a method's chunks that have stored KV.

    Raises:
        ValueError: names a share that is none.
    """
    given = [part for part in name.split(":") if part.startswith("known=")]
    return check_ratio("known", float(given[0].removeprefix("known="))) if given else 1.0


def blend_settings(name: str) -> BlendSettings | None:
    """The settings that a method's name stands for; None for one that does not blend.

    Raises:
        ValueError: names the method or the setting that is not known.
    """
    if name in PLAIN:
        return None
    name, _ = split_behind(name)
    head, *rest = name.split(":")
    policy, at, ratio = "hkvd@0".partition("@") if head == "reuse" else head.partition("@")
    if not at:
        raise ValueError(f"method is {name!r}; allowed: {', '.join(PLAIN)}, reuse, POLICY@RATIO[:...]")
    values: dict[str, Any] = {"policy": policy}
    try:
        values["recomp_ratio"] = float(ratio)
        for part in rest:
            key, _, text = part.partition("=")
            if key == "known":
                known_share(part)
                continue
            values[key] = _VALUES.get(key, str)(text)
    except ValueError as error:
        raise ValueError(f"method is {name!r}; {error}") from None
    return BlendSettings.from_mapping(values)

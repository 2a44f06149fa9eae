"""Draws three_prefills.svg: one RAG prompt prefilled three ways.

python docs/draw_three_prefills.py

Times and row counts of full and blended prefill are read from results/ttft_h100_mistral-7b.json; the
prefix cache's, measured on another GPU, from results/ttft_h200.csv, by its ratio to full prefill there.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

DOCS = Path(__file__).parent
TOKENS = 8192
CHUNKS = 6
LEFT, WIDTH, BAR = 150, 430, 26
HEAD, QUESTION = 14, 22
COMPUTED, REUSED, INK, PALE = "#c2410c", "#93c5fd", "#1f2937", "#6b7280"


def text(x: float, y: float, words: str, size: int = 13, fill: str = INK, **more: str) -> str:
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{extra}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def prompt(y: float, computed: set[int], ticks: float = 0.0) -> list[str]:
    """Head, chunks, question: chunks in ``computed`` in full, of the others the share ``ticks``."""
    chunk = (WIDTH - HEAD - QUESTION - 2 * (CHUNKS + 1)) / CHUNKS
    x = float(LEFT)
    found = [box(x, y, HEAD, BAR, REUSED if ticks else COMPUTED)]
    if computed != set(range(CHUNKS)):
        found = [box(x, y, HEAD, BAR, REUSED)]
    x += HEAD + 2
    for index in range(CHUNKS):
        whole = index in computed
        found.append(box(x, y, chunk, BAR, COMPUTED if whole else REUSED))
        if ticks and not whole:
            places = [0.0, 0.03, 0.07, 0.31 + 0.05 * (index % 3), 0.58 - 0.04 * (index % 2), 0.83]
            width = ticks * chunk / len(places)
            found += [box(x + place * chunk, y, width, BAR, COMPUTED) for place in places]
        x += chunk + 2
    return [*found, box(x, y, QUESTION, BAR, COMPUTED)]


def measured() -> tuple[dict[str, tuple[float, int]], float, str]:
    """Milliseconds and computed rows by method; the prefix cache's ratio, and its source."""
    runs = json.loads((DOCS / "results/ttft_h100_mistral-7b.json").read_text())["results"]
    times = {r["method"]: (1000 * r["ttft_s"], r["rows"]) for r in runs if r["tokens"] == TOKENS}
    with (DOCS / "results/ttft_h200.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["tokens"] == str(TOKENS)]
    row = next(r for r in rows if r["backend"] == "FLASH_ATTN")
    source = f"H200: {row['prefix hit (ms)']} of {row['stock (ms)']} ms"
    return times, float(row["prefix hit (ratio)"]), source


def picture() -> str:
    """The SVG."""
    times, prefix_ratio, source = measured()
    stock, all_rows = times["stock"]
    default, rows = times["ahead*static 8%, KV pinned"]
    static, _ = times["static 8%, KV pinned"]
    scale = 150 / stock
    out = [
        text(LEFT, 24, f"the prompt: {TOKENS:,} tokens", weight="bold", size=13),
        text(LEFT + WIDTH + 30, 24, "time to first token", size=13),
        text(LEFT, 44, "head", 11, PALE),
        text(LEFT + WIDTH / 2, 44, "six retrieved chunks", 11, PALE, text_anchor="middle"),
        text(LEFT + WIDTH, 44, "question", 11, PALE, text_anchor="end"),
    ]
    ways = [
        ("full prefill", f"{all_rows:,} tokens computed", set(range(CHUNKS)), 0.0, [(stock, "")]),
        (
            "prefix cache",
            "first chunk reused",
            set(range(1, CHUNKS)),
            0.0,
            [(stock / prefix_ratio, f"{prefix_ratio:g}x*")],
        ),
        (
            "blended",
            f"{rows:,} tokens computed",
            set(),
            0.08,
            [(default, f"{stock / default:.1f}x, default"), (static, f"{stock / static:.1f}x, static")],
        ),
    ]
    for index, (name, note, computed, ticks, bars) in enumerate(ways):
        y = 58 + 62 * index
        out += [text(12, y + 13, name, weight="bold"), text(12, y + 29, note, 11, PALE)]
        out += prompt(y, computed, ticks)
        for at, (milliseconds, label) in enumerate(bars):
            x, height = LEFT + WIDTH + 30, BAR if len(bars) == 1 else 14
            top = y + at * 19
            out.append(box(x, top, scale * milliseconds, height, INK))
            shown = f"{milliseconds:.1f} ms" if label != f"{prefix_ratio:g}x*" else ""
            words = ", ".join(part for part in (shown, label) if part)
            out.append(text(x + scale * milliseconds + 6, top + height - 3, words, 12))
    y = 58 + 62 * len(ways) + 6
    out += [
        box(LEFT, y, 12, 12, COMPUTED),
        text(LEFT + 18, y + 10, "computed", 11),
        box(LEFT + 90, y, 12, 12, REUSED),
        text(LEFT + 108, y + 10, "KV reused (8% of its tokens recomputed, where blended)", 11),
        text(
            12,
            y + 34,
            "NVIDIA H100, Mistral-7B's shape, bf16, chunks' KV in pinned host memory. "
            f"* drawn by its ratio on another GPU ({source}).",
            11,
            PALE,
        ),
    ]
    height = y + 46
    body = "\n".join(out).replace(' weight="', ' font-weight="')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {height}" width="880" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img" '
        'aria-label="One prompt prefilled three ways: full prefill, prefix cache, blended">\n'
        f'<rect width="880" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    (DOCS / "three_prefills.svg").write_text(picture(), encoding="utf-8")

"""One self-contained HTML page: a prompt's deviation, and the figures of a run.

    vllm-blend eval report --data inputs/eval/musique.json --task musique \\
        --results .out/musique

The page loads nothing: figures are inside it. It shows the first example of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_blend.cli.eval import figures
from vllm_blend.cli.eval.command import command_parser, data_set, results_folder
from vllm_blend.cli.eval.diagnose import Diagnosis, diagnose
from vllm_blend.cli.eval.run import make_blender
from vllm_blend.cli.eval.runs import read_results
from vllm_blend.cli.eval.stats import Summary, summarize
from vllm_blend.cli.eval.tables import HEADER, row
from vllm_blend.cli.eval.tasks import TASKS
from vllm_blend.core.settings import BlendSettings

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1, h2 { line-height: 1.2 } img { max-width: 100%; display: block } p.note { color: #555 }
.chunk { border-left: 3px solid #bbb; padding-left: .8rem; margin: 1rem 0; white-space: pre-wrap }
.kept { outline: 1.5px solid #1f5fbf } table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
td, th { border: 1px solid #ccc; padding: .2rem .5rem; text-align: left; white-space: nowrap }
</style></head><body>
<h1>{{ title }}</h1>
<p class="note">{{ model }}; {{ num_tokens }} chunk tokens in {{ texts|length }} chunks; policy
{{ settings.policy }}, {{ "%.0f" % (100 * settings.recomp_ratio) }}% recomputed.</p>
{% for heading, note, image in images %}
<h2>{{ heading }}</h2><p class="note">{{ note }}</p><img alt="{{ heading }}" src="{{ image }}">
{% endfor %}
{% if rows %}<h2>Methods</h2><p class="note">Means with their 95% bootstrap interval; paired with full
prefill on the same prompts.</p>
<table><tr>{% for cell in header %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell.strip("`") }}</td>{% endfor %}</tr>{% endfor %}</table>{% endif %}
<h2>The text</h2><p class="note">The redder, the further stored V is from full prefill's (mean over layers);
framed tokens are recomputed.</p>
{% for tokens in texts %}<div class="chunk">{% for token, shade, kept in tokens %}<span
 style="background: rgba(220, 40, 30, {{ "%.2f" % shade }})"{% if kept %} class="kept"{% endif %}
>{{ token }}</span>{% endfor %}</div>{% endfor %}
</body></html>
"""  # noqa: E501


def render(
    found: dict[str, Diagnosis], settings: BlendSettings, model: str, summaries: Sequence[Summary] = ()
) -> str:
    """The page, of a diagnosis by policy; ``settings``' own policy is the one shown in full."""
    from jinja2 import Environment

    main = found[settings.policy]
    images = [
        ("Deviation by token and layer", "White lines part the chunks.", figures.deviation_map(main)),
        ("How deviation is spread", "A few tokens deviate far.", figures.deviation_cdf(main)),
        (
            "Rank correlation of layers",
            "Near 1: tokens that deviate in one layer do so in the next.",
            figures.rank_correlation(main),
        ),
        (
            "Attention deviation against the ratio",
            "Of the question's attention output, mean over layers.",
            figures.attention_deviation(found),
        ),
    ]
    timed = [summary for summary in summaries if summary.ttft is not None]
    for task in dict.fromkeys(summary.task for summary in summaries):
        images.append(
            (f"{task}: KL by ratio", "Lower is nearer.", figures.kl_by_ratio(summaries, task))
        )
        if any(summary.task == task for summary in timed):
            heading = f"{task}: time to first token"
            images.append((heading, "Medians.", figures.ttft_bars(timed, task)))
    page = Environment(autoescape=True).from_string(PAGE)
    return page.render(
        title="vllm_blend: what reuse changes",
        model=model,
        num_tokens=len(main.tokens),
        settings=settings,
        texts=texts(main),
        images=images,
        header=HEADER,
        rows=[row(summary) for summary in summaries],
    )


def texts(found: Diagnosis) -> list[list[tuple[str, float, bool]]]:
    """By chunk: each token's text, its shade from 0 to 1, and whether it is recomputed."""
    mean = found.deviation[1:].mean(axis=0)
    shade = (mean / max(float(mean.max()), 1e-9)).tolist()
    cells = zip(found.chunk.tolist(), found.tokens, shade, found.kept.tolist(), strict=True)
    return [[cell[1:] for cell in group] for _, group in groupby(cells, key=lambda cell: cell[0])]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser(__doc__, "report")
    parser.add_argument("--data", type=data_set, required=True, help=".json, .jsonl or .jsonl.gz")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--results", type=results_folder, help="of eval run --output, to show too")
    parser.add_argument("--policies", nargs="+", default=["hkvd", "ahead", "random"])
    parser.add_argument("--ratio", type=float, default=0.16)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0, 0.05, 0.16, 0.3, 0.5, 1])
    parser.add_argument("--output", type=Path, default=Path(".out/report.html"))
    options = parser.parse_args(argv)
    try:
        settings = [BlendSettings(policy=p, recomp_ratio=options.ratio) for p in options.policies]
    except ValueError as error:
        parser.error(str(error))
    summaries = summarize(read_results(options.results)) if options.results else []
    task, example = TASKS[options.task], options.data[0]
    blender = make_blender(options.model, 8192, task.header)
    chunks = blender.chunks(task.chunks(blender.tokenizer, example, 512))
    prompt = blender.prompt(chunks, task.ask(example))
    found: dict[str, Any] = {}
    for each in settings:
        found[each.policy] = diagnose(blender, prompt, each, options.ratios)
    name = options.model.name if options.model else "SmolLM2-135M-Instruct"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(render(found, settings[0], name, summaries))
    print(f"Written: {options.output}")

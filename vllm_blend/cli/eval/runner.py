"""Runs methods on examples; once one is done, or a batch of them, each result is a line of JSON.

A run is paired: every method gets the same token ids as full prefill, and is compared with it on the
answer that full prefill gives. A run that was stopped goes on where it was: what has a line is not run
again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vllm_blend.cli.eval import asking, forcing
from vllm_blend.cli.eval.data import Example, Passage, of_length
from vllm_blend.cli.eval.methods import (
    BEHIND,
    OTHERS,
    OVERLAP,
    STAND_IN,
    blend_settings,
    known_share,
    split_behind,
)
from vllm_blend.cli.eval.metrics import score
from vllm_blend.cli.eval.runs import RESULTS, RUN, Protocol, Result, read_results
from vllm_blend.cli.eval.tasks import Task
from vllm_blend.core.prompt import TokenIds

if TYPE_CHECKING:
    from vllm_blend.api.blender import Blender
    from vllm_blend.api.prompts import Chunk
    from vllm_blend.core.settings import BlendSettings

Kind = tuple[str | None, float]
"""What chunks are computed after, and which share of them is known."""
WHOLE: Kind = (None, 1.0)


@dataclass
class Cell:
    """One method on one example, while it is being filled in: how far it is, and what it answers.

    Attributes:
        asker: of chunks computed after what the method says.
        full: what full prefill says.
    """

    method: str
    asker: asking.Asker
    full: forcing.Full
    distance: forcing.Distance | None = None
    answer: asking.Answer | None = None

    @property
    def settings(self) -> BlendSettings | None:
        """None if the method does not blend."""
        return blend_settings(self.method)


class Runner:
    """Methods on examples of one engine.

    Args:
        blender: with ``chat=False`` for tasks with worked examples.
        protocol: of the run.
        folder: where results go; made if it is not there.
        batch: examples whose requests run together; 1: one request after the other, which takes longer
            and measures TTFT.

    Attributes:
        pool: where a method needs another example, it is taken from these; empty: from those that run.

    Raises:
        ValueError: if the folder holds results of another protocol; names both.
    """

    def __init__(self, blender: Blender, protocol: Protocol, folder: Path, batch: int = 1) -> None:
        if batch < 1:
            raise ValueError(f"batch is {batch}; allowed: 1 or more")
        self.blender, self.protocol, self.folder, self.batch = blender, protocol, folder, batch
        folder.mkdir(parents=True, exist_ok=True)
        found = folder / RUN
        if found.exists() and Protocol(**json.loads(found.read_text())) != protocol:
            raise ValueError(
                f"{folder} holds results of {found.read_text().strip()}, not of "
                f"{json.dumps(asdict(protocol))}; give another folder"
            )
        found.write_text(json.dumps(asdict(protocol)) + "\n")
        self.results = read_results(folder)
        self.pool: Sequence[Example] = ()
        self._other: dict[Example, Example] = {}

    def of_length(self, task: Task, examples: Sequence[Example], tokens: int) -> list[Example]:
        """The examples with prompts of about ``tokens``, and no more unless gold passages alone have
        more (``data.of_length``).

        Raises:
            ValueError: names an example for which all the passages are too few, or with room for none.
        """

        @cache
        def length(passage: Passage) -> int:
            pieces = self._token_ids(task, replace(bare, passages=(passage,)))
            return sum(map(len, pieces))

        def room(example: Example) -> int:
            ask = self.blender.tokenizer.encode(task.ask(example), add_special_tokens=False)
            return tokens - len(self.blender.head_ids(task.header)) - len(ask) - len(frame.tail)

        bare, frame = examples[0], self.blender.frame
        return of_length(examples, room, length)

    def run(self, task: Task, examples: Iterable[Example], methods: Sequence[str]) -> list[Result]:
        """Results of ``methods`` (and ``full``) on ``examples``, those found in the folder included.

        Raises:
            ValueError: names a method that is not known, an id that several examples have, or an
                example without another that a method needs.
        """
        for method in methods:
            blend_settings(method)  # refuses an unknown one before the first is run
        examples = list(examples)
        if any(split_behind(method)[1] in OTHERS for method in methods):
            self._other = others(examples, self.pool or examples)
        if len(ids := Counter(example.id for example in examples)) < len(examples):
            name, count = ids.most_common(1)[0]
            raise ValueError(f"{count} examples have the id {name!r}; results are told apart by it")
        names = list(dict.fromkeys(["full", *methods]))
        done = {(r.task, r.example, r.method) for r in self.results}
        work = []
        for example in examples:
            missing = [m for m in names if (task.name, example.id, m) not in done]
            if missing:
                work.append((example, missing))
        with (self.folder / RESULTS).open("a") as file, tqdm(total=len(work), unit="example") as bar:
            for start in range(0, len(work), self.batch):
                part = work[start : start + self.batch]
                bar.set_description(f"{task.name} {part[0][0].id}"[:40])
                for result in self.examples(task, part):
                    self.results.append(result)
                    file.write(json.dumps(asdict(result)) + "\n")
                file.flush()
                bar.update(len(part))
        return [r for r in self.results if r.task == task.name and r.method in names]

    def examples(self, task: Task, work: Sequence[tuple[Example, Sequence[str]]]) -> list[Result]:
        """Each example by its methods; the chunks' KV is dropped afterwards."""
        names = dict.fromkeys(method for _, methods in work for method in methods)
        kinds = dict.fromkeys([WHOLE, *map(kind_of, names)])
        wanted = [settings for name in names if (settings := blend_settings(name)) is not None]
        self.blender.scored = any("static" in settings.policies for settings in wanted)
        askers: dict[Kind, list[asking.Asker]] = {}
        try:
            askers = self._askers(task, [example for example, _ in work], [*kinds])
            fulls = forcing.full_prefill(askers[WHOLE], self.protocol.kl_tokens)
            cells = [
                Cell(method, askers[kind_of(method)][index], full)
                for index, ((_, methods), full) in enumerate(zip(work, fulls, strict=True))
                for method in methods
            ]
            self._compare(cells)
            self._answer(cells)
            return [self._result(cell) for cell in cells]
        finally:
            for asker in (asker for found in askers.values() for asker in found):
                for chunk in asker.chunks:
                    self.blender.forget(chunk)

    def _askers(
        self, task: Task, examples: Sequence[Example], kinds: Sequence[Kind]
    ) -> dict[Kind, list[asking.Asker]]:
        """The same prompts each time, of chunks computed after their head or something else, or new."""
        blender = self.blender
        pieces = {example: self._token_ids(task, example) for example in examples}
        contexts = {
            (kind, example): self._contexts(task, example, kind[0])
            for kind in kinds
            for example in examples
        }
        wanted = [
            pair
            for (_, example), behind in contexts.items()
            for pair in zip(behind, pieces[example], strict=True)
        ]
        chunks = iter(blender.obtain(wanted))  # all at once, so that they may serve each other
        found: dict[Kind, list[asking.Asker]] = {kind: [] for kind in kinds}
        for kind, example in contexts:
            these = spread([next(chunks) for _ in pieces[example]], kind[1])
            prompt = blender.prompt(these, task.ask(example), head=task.header)
            found[kind].append(asking.Asker(blender, task, example, these, prompt))
        return found

    def _pieces(self, task: Task, example: Example) -> list[tuple[list[int], list[int]]]:
        protocol = self.protocol
        return task.pieces(
            self.blender.tokenizer, example, protocol.chunk_tokens, protocol.passage_tokens
        )

    def _token_ids(self, task: Task, example: Example) -> list[TokenIds]:
        """The chunks of an example, as they stand in its prompt."""
        return self.blender.token_ids([piece for piece, _ in self._pieces(task, example)])

    def _contexts(self, task: Task, example: Example, behind: str | None) -> list[TokenIds]:
        """What each chunk of an example is computed after."""
        blender, pieces = self.blender, self._pieces(task, example)
        head = blender.head_ids(task.header)
        if behind == "bos":
            head = blender.head_ids([bos_id(blender.tokenizer)])
        elif behind in ("nothing", "another"):
            head = blender.head_ids(BEHIND[behind])
        elif behind == "before":
            return [head + tuple(text[-OVERLAP:]) for _, text in pieces]
        before: list[TokenIds] = [()] * len(pieces)
        if behind == "others":
            before = [self.stand_in(task, self._other[example])] * len(pieces)
        elif behind == "text":
            before = [blender.own_text + blender.separator] * len(pieces)
        elif behind == "harvested":
            other = self._token_ids(task, self._other[example])
            before = [tuple(chain.from_iterable(other[:count])) for count in range(len(pieces))]
        return [head, *(head + text for text in before[1:])]  # the first one is exact after the head

    def stand_in(self, task: Task, example: Example) -> TokenIds:
        """The end of an example's passages, as they stand in its prompt."""
        return tuple(chain.from_iterable(self._token_ids(task, example)))[-STAND_IN:]

    def _compare(self, cells: Sequence[Cell]) -> None:
        """Fills in how far each blended prompt is, and the answer where that tells it."""
        blended = [(cell, settings) for cell in cells if (settings := cell.settings) is not None]
        # all together, or each alone
        size = max(len(blended), 1) if self.batch > 1 else 1
        for start in range(0, len(blended), size):
            part = blended[start : start + size]
            found = forcing.distances([(cell.asker, settings, cell.full) for cell, settings in part])
            for (cell, _), distance in zip(part, found, strict=True):
                cell.distance = distance
                whole = len(cell.full.forced) == len(cell.full.answer.token_ids)
                if distance.top1 == 1 and whole:
                    cell.answer = cell.full.answer

    def _answer(self, cells: Sequence[Cell]) -> None:
        """Fills in the answers that are still to be had."""
        of: dict[str, list[Cell]] = {}
        for cell in cells:
            of.setdefault(cell.method, []).append(cell)
        for cell in of.get("full", []):
            cell.answer = cell.full.answer
        if prefixed := of.get("prefix"):
            _fill(prefixed, asking.ask_prefixed([cell.asker for cell in prefixed]))
        reduced, reranked = of.get("mapreduce", []), of.get("maprerank", [])
        if mapping := {cell.asker.example.id: cell.asker for cell in (*reduced, *reranked)}:
            each = asking.ask_each_chunk([*mapping.values()])
            mapped = dict(zip(mapping, each, strict=True))
            if reduced:
                parts = [mapped[cell.asker.example.id] for cell in reduced]
                _fill(reduced, asking.ask_reduced([cell.asker for cell in reduced], parts))
            _fill(reranked, [mapped[cell.asker.example.id].best() for cell in reranked])
        if self.protocol.answers:
            left = [(c, settings) for c in cells if c.answer is None and (settings := c.settings)]
            _fill([c for c, _ in left], asking.ask_blended([(c.asker, s) for c, s in left]))

    def _result(self, cell: Cell) -> Result:
        asker, full, distance = cell.asker, cell.full.answer, cell.distance
        answer = cell.answer if self.protocol.answers or cell.settings is None else None
        numbers: dict[str, float] = {}
        ttft = distance.ttft if distance else cell.answer.ttft if cell.answer else None
        if distance is not None:
            numbers = dict(kl=distance.kl, first_kl=distance.first_kl, top1=distance.top1)
        elif cell.method == "full":
            numbers = dict(kl=0.0, first_kl=0.0, top1=1.0)
        return Result(
            task=asker.task.name,
            example=asker.example.id,
            method=cell.method,
            num_tokens=len(asker.prompt.token_ids),
            num_reused=asker.prompt.num_reused if cell.settings else 0,
            answer=answer.text if answer else None,
            score=score(asker.task.metric, answer.text, asker.example.answers) if answer else None,
            ttft=ttft if self.batch == 1 else None,
            same=answer.token_ids == full.token_ids if answer else None,
            **numbers,
        )


def kind_of(method: str) -> Kind:
    """What a method's prompts are made of."""
    return split_behind(method)[1], known_share(method)


def spread(chunks: Sequence[Chunk], known: float) -> list[Chunk]:
    """Chunks of which this share, evenly among them, keeps its KV."""
    counts = [int(index * known + 1e-9) for index in range(len(chunks) + 1)]
    return [
        chunk if before < after else replace(chunk, kv=None)
        for chunk, (before, after) in zip(chunks, pairwise(counts), strict=True)
    ]


def _fill(cells: Sequence[Cell], answers: Sequence[asking.Answer]) -> None:
    for cell, answer in zip(cells, answers, strict=True):
        cell.answer = answer


def others(examples: Sequence[Example], pool: Sequence[Example]) -> dict[Example, Example]:
    """For each the next one in ``pool`` that has no passage in common with it; the last is followed by
    the first.

    Raises:
        ValueError: names one that has a passage in common with all others.
    """
    found = {}
    for example in examples:
        texts = {passage.text for passage in example.passages}
        at = pool.index(example)
        for other in (*pool[at + 1 :], *pool[:at]):
            if texts.isdisjoint(passage.text for passage in other.passages):
                found[example] = other
                break
        else:
            raise ValueError(
                f"{example.id!r} has a passage in common with every other example, so none of them can "
                "give it a stand-in"
            )
    return found


def bos_id(tokenizer: Any) -> int:
    """What a text begins with in training: BOS, or EOS where there is none.

    Raises:
        ValueError: if the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError("the tokenizer has neither BOS nor EOS")

"""``vllm-blend warm``: chunks that a server, or a store, is to know before clients ask."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_blend.cli.client import Server, ServerError, report_of, with_parts
from vllm_blend.cli.engine_args import engine_options, first_line
from vllm_blend.cli.options import Arguments, Json, Settings, Url, folder_or_name
from vllm_blend.cli.output import (
    console,
    found_wrong,
    help_text,
    print_json,
    quiet_vllm,
    say,
    wrong_call,
)
from vllm_blend.cli.settings import settings_or_wrong_call
from vllm_blend.cli.sources import read_texts

QUESTION = "What is this about?"
AT_ONCE = 32
"""Chunks that are computed in one batch for a store."""

HELP = help_text(
    """Let a running server, or a store, compute chunks before clients ask for them.

    SOURCE is a folder, whose .txt and .md files are a chunk each; a .jsonl file: lines with "text", or
    with "chunks" as prompts have them; or hf:NAME, a Hugging Face data set by its name or folder, which
    needs the package datasets. Cut texts as your retriever does: a chunk is found by its token ids.

    With --url, the server is asked about the texts. With --model and a store's --settings, the chunks
    are computed here, and written to the store's tiers, where servers of the same model find them. With
    --progress a run that was stopped goes on where it was.""",
    "vllm-blend warm passages/ --url http://127.0.0.1:8000",
    "vllm-blend warm passages.jsonl --url http://127.0.0.1:8000 --progress done.txt",
    "vllm-blend warm hf:NAME --column passage --split train --url http://127.0.0.1:8000",
    "vllm-blend warm passages.jsonl --model MODEL --settings blend.yaml -- --dtype bfloat16",
)


@dataclass
class Count:
    """What became of the texts.

    Attributes:
        new: that were computed; known: that were there; done: by an earlier run (``--progress``).
        refused: texts that are too long, or too short to be a chunk.
    """

    new: int = 0
    known: int = 0
    done: int = 0
    refused: int = 0


def warm(
    source: Annotated[str, typer.Argument(help="Folder of texts, lines of JSON, or hf:NAME.")],
    arguments: Arguments = None,
    url: Url = None,
    model: Annotated[
        str | None, typer.Option(help="Compute here, with this model.", callback=folder_or_name)
    ] = None,
    settings: Settings = None,
    tenant: Annotated[str, typer.Option(help="Whose chunks they are: the requests' cache_salt.")] = "",
    split: Annotated[str, typer.Option(help="Of a data set.")] = "train",
    column: Annotated[str, typer.Option(help="Of a data set: a text, or a list of texts.")] = "text",
    per_request: Annotated[int, typer.Option(min=1, help="Texts of a request to the server.")] = 4,
    progress: Annotated[
        Path | None, typer.Option(help="File that notes which texts are done; made if need be.")
    ] = None,
    as_json: Json = False,
) -> None:
    quiet_vllm()
    if (url is None) == (model is None):
        raise wrong_call("give --url, or --model with --settings of a store")
    try:
        texts = list(dict.fromkeys(read_texts(source, split, column)))
    except (OSError, ValueError) as error:
        raise wrong_call(str(error), "SOURCE") from None
    where = url or str(settings_or_wrong_call(settings).get("store"))
    book = Book(progress, f"{where} {tenant}")
    count = Count(done=sum(text in book for text in texts))
    left = [text for text in texts if text not in book]
    try:
        if url is not None:
            steps = by_requests(Server(url), left, tenant, per_request, count)
        else:
            assert model is not None
            steps = into_store(model, settings_or_wrong_call(settings), left, tenant, arguments, count)
        _follow(steps, book, len(left))
    except ServerError as error:
        console(stderr=True).print(
            f"stopped after {count.new + count.known} texts: {error}", markup=False
        )
        raise found_wrong() from None
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise wrong_call(first_line(error)) from None
    if as_json:
        print_json({"texts": len(texts)} | asdict(count))
    else:
        earlier = f", {count.done} done before" if count.done else ""
        found = f"{count.new} new, {count.known} known, {count.refused} refused"
        say(f"{len(texts)} texts: {found}{earlier}")
    if count.refused:
        raise found_wrong()


class Book:
    """Which texts are done, in a file; None: in no file.

    Args:
        target: for what they are done; another one begins anew.
    """

    def __init__(self, path: Path | None, target: str) -> None:
        self._path, self._target = path, target
        self._done: set[str] = set()
        if path is not None and path.exists():
            self._done = set(path.read_text().split())

    def __contains__(self, text: str) -> bool:
        return self._name(text) in self._done

    def note(self, texts: Sequence[str]) -> None:
        """These are done."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write("".join(f"{self._name(text)}\n" for text in texts))

    def _name(self, text: str) -> str:
        return sha256(json.dumps([self._target, text]).encode()).hexdigest()[:32]


def by_requests(
    server: Server, texts: Sequence[str], tenant: str, per_request: int, count: Count
) -> Iterator[list[str]]:
    """Asks a server about the texts; yields those of a request once it is answered."""
    model = server.model()
    waiting = [list(texts[at : at + per_request]) for at in range(0, len(texts), per_request)][::-1]
    while waiting:
        group = waiting.pop()
        salt = {"cache_salt": tenant} if tenant else {}
        blend = {"report": True, "keep": True}
        body = with_parts(group, QUESTION, blend, model=model, max_tokens=1, **salt)
        try:
            report = report_of(server.post("/v1/chat/completions", body))
        except ServerError as error:
            if error.status != 400 or "context length" not in str(error):
                raise
            if len(group) > 1:  # too long together
                half = len(group) // 2
                waiting += [group[half:], group[:half]]
            else:
                count.refused += 1
                yield group
            continue
        if not report:
            raise ServerError(
                "its answer has no report: was it started to blend? (vllm-blend doctor --url)"
            )
        short = max(0, len(group) - sum(report[f"{name}chunks"] for name in ("", "cached_", "missed_")))
        count.refused += short
        count.new += report["missed_chunks"]
        count.known += len(group) - short - report["missed_chunks"]
        yield group


def into_store(
    model: str,
    settings: Mapping[str, Any],
    texts: Sequence[str],
    tenant: str,
    arguments: Sequence[str] | None,
    count: Count,
) -> Iterator[list[str]]:
    """Computes chunks here, after what a server of these settings computes them after, and writes them;
    yields texts once they are in the store's memory. Each is computed as it stands first in a prompt,
    and as it stands later."""
    from vllm_blend.api.blender import Blender
    from vllm_blend.cli.eval.run import make_blender
    from vllm_blend.server.chunks.chunk_contexts import chunk_contexts
    from vllm_blend.server.config import ServerSettings
    from vllm_blend.server.request import pieces
    from vllm_blend.store import open_store

    read = ServerSettings.from_mapping(settings)
    if read.store is None:
        raise ValueError("the settings have no store to write to")
    options = engine_options(arguments or [])
    longest = options.pop("max_model_len", None) or 8192
    engine = make_blender(Path(model), longest, **options).llm
    contexts = chunk_contexts(
        engine.llm_engine.vllm_config,
        read.system,
        read.head,
        read.stand_in,
        read.chat_template,
        read.chat_template_kwargs,
    )
    with open_store(read.store) as store:
        blender = Blender(engine, read.blend, chat=False, stand_in="", store=store, salt=tenant)
        for at in range(0, len(texts), AT_ONCE):
            group = texts[at : at + AT_ONCE]
            wanted = []
            for text in group:
                ids = tuple(blender.tokenizer.encode(text, add_special_tokens=False))
                if len(ids) < read.min_chunk_tokens:
                    count.refused += 1
                    continue
                cuts = pieces(0, len(ids), read.max_chunk_tokens)
                both = dict.fromkeys((contexts.first, contexts.later))
                pairs = [(context, ids[lo:hi]) for lo, hi in cuts for context in both]
                there = all(store.contains(blender.key(part, context)) for context, part in pairs)
                count.known += there
                count.new += not there
                wanted += [] if there else pairs
            blender.obtain(wanted)
            if not store.flush(600.0):
                raise OSError("the store's tiers did not take what was written within 600 s")
            yield list(group)


def _follow(steps: Iterator[list[str]], book: Book, total: int) -> None:
    """Runs the steps, shows how far they are, notes what is done."""
    from rich.progress import Progress

    with Progress(console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("warming", total=total)
        for texts in steps:
            book.note(texts)
            bar.advance(task, len(texts))

"""Servers to measure, on a model or on a model's shape, and vLLM's own client to drive them."""

from __future__ import annotations

import argparse
import io
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import IO, Any

from harness import samples, texts
from tokenizers import Tokenizer
from ttft_shapes import COMMON, SHAPES

import vllm_blend
from vllm_blend import embedded_model

SEPARATOR = "<|chunk|>"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A command line, with the arguments that name a model."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--shape", choices=SHAPES, help="instead: this shape, dummy weights")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="of --shape (default: SmolLM2's folder)")
    return parser


def model_of(options: argparse.Namespace, folder: pathlib.Path) -> str:
    """The folder of the model that was named."""
    if options.shape:
        return str(make_shape(options.shape, options.tokenizer or embedded_model(), folder))
    return str(options.model or embedded_model())


def make_shape(shape: str, tokenizer: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A model folder of a real model's shape without weights, with a tokenizer of another."""
    for path in tokenizer.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config = COMMON | SHAPES[shape] | {"vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plugin_path(folder: pathlib.Path) -> list[str]:
    """What PYTHONPATH needs so that a server finds the plugin, also where it is not installed."""
    package = str(pathlib.Path(vllm_blend.__file__).parents[1])
    if any(found.name == "vllm_blend" for found in entry_points(group="vllm.general_plugins")):
        return [package]
    info = folder / "vllm_blend-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm_blend\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nvllm_blend = vllm_blend.plugin:register\n"
    )
    return [str(folder), package]


def plugin_environment(folder: pathlib.Path) -> dict[str, str]:
    """What a server's environment needs so that it finds the plugin."""
    return {"PYTHONPATH": os.pathsep.join([*plugin_path(folder), os.environ.get("PYTHONPATH", "")])}


def documents(count: int, chunk_tokens: list[int] | None, model: pathlib.Path) -> list[str]:
    """Texts of the inputs; beyond them, the same with their sentences in another order.

    Args:
        chunk_tokens: length of a document, from, to: sentences of all inputs, until it has so many.
        model: folder of the model, for its tokenizer.
    """
    found = [text for sample in samples() for text in texts(sample)]
    if chunk_tokens is not None:
        encode = Tokenizer.from_file(str(model / "tokenizer.json")).encode
        choose = random.Random(0)
        sentences = [part for text in found for part in re.split(r"(?<=[.!?])\s+", text)]
        sizes = {sentence: len(encode(f"{sentence} ").ids) for sentence in sentences}
        found = []
        for _ in range(count):
            left, parts = choose.randint(*chunk_tokens), []
            while left > 0:
                parts.append(choose.choice(sentences))
                left -= sizes[parts[-1]]
            found.append(" ".join(parts))
        return found
    shuffle = random.Random(0).shuffle
    for text in list(found) * (count // len(found)):
        sentences = re.split(r"(?<=[.!?])\s+", text)
        shuffle(sentences)
        found.append(" ".join(sentences))
    return found[:count]


@dataclass
class Server:
    """A server's process, its address and its log."""

    process: subprocess.Popen[bytes]
    url: str
    log: IO[bytes]


@contextmanager
def server(
    model: str, arguments: list[str], environment: dict[str, str], log: IO[bytes]
) -> Iterator[Server]:
    """Starts an OpenAI server; it ends with the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_LOGGING_LEVEL": "WARNING",
        **os.environ,
        **environment,
    }
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield Server(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def log_of(kind: str, folder: pathlib.Path | None) -> IO[bytes]:
    """Where a server's log goes."""
    return tempfile.TemporaryFile() if folder is None else (folder / f"{kind}.log").open("w+b")


def wait_for(name: str, server: Server) -> str:
    """The server's address, once it is up."""
    started = time.monotonic()
    while server.process.poll() is None and not responds(f"{server.url}/health"):
        time.sleep(1)
    if server.process.poll() is not None:
        server.log.seek(0)
        text = server.log.read()[-3000:].decode(errors="replace")
        raise RuntimeError(f"the server {name} ended: {text}")
    print(f"{name}: up after {time.monotonic() - started:.0f} s", flush=True)
    return server.url


def responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=600) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: bytes = answer.read()
    return text.decode()


def reset_prefix_cache(url: str) -> None:
    post(f"{url}/reset_prefix_cache")


def run_client(
    url: str,
    model: str,
    prompts: list[str],
    limits: list[str],
    output_tokens: int,
    blend: dict[str, Any] | str | None,
) -> dict[str, Any]:
    """vLLM's ``bench serve`` on the prompts, blended as ``blend`` says if it is there; its result."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        command = ["--model", model, "--base-url", url, "--disable-tqdm"]
        command += ["--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle"]
        command += ["--skip-chat-template", "--custom-output-len", str(output_tokens), "--ignore-eos"]
        command += ["--num-prompts", str(len(prompts)), "--save-result", "--result-dir", folder]
        command += ["--result-filename", "result.json", "--temperature", "0", *limits]
        if blend is not None:
            fields = {"vllm_xargs": {"blend": blend if isinstance(blend, str) else json.dumps(blend)}}
            command += ["--extra-body", json.dumps(fields)]
        with redirect_stdout(io.StringIO()):
            main(parser.parse_args(command))
        found: dict[str, Any] = json.loads((pathlib.Path(folder) / "result.json").read_text())
    return found

"""A blending server of the user's arguments, started for a command and ended with it."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from vllm_blend.cli.client import Server, ServerError
from vllm_blend.cli.output import working
from vllm_blend.cli.serve import server_command

PAUSE_S = 0.5
END_S = 60.0
"""A server that takes longer to end is killed."""
LOG_LINES = 15
"""Of its log's end, where it does not start."""


@contextmanager
def server_process(
    model: str, arguments: Sequence[str], settings: Mapping[str, Any]
) -> Iterator[Server]:
    """``vllm serve`` with these settings, on a free port of this machine.

    Raises:
        ValueError: for arguments that vLLM does not know.
        ServerError: if it ends before it serves; says how its log ends.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bound = [*arguments, "--host", "127.0.0.1", "--port", str(port)]
    command, environment = server_command(model, bound, settings)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            with working(f"starting a server of {model}"):
                server = Server(f"http://127.0.0.1:{port}", timeout_s=600.0)
                _wait(server, process, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(server: Server, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    """Until it is up."""
    while process.poll() is None:
        try:
            server.get("/health")
            return
        except ServerError:
            time.sleep(PAUSE_S)
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    raise ServerError("the server ended before it served; its log ends so:\n" + "\n".join(lines))

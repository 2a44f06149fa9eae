"""A server of fixed answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def answering(answers: dict[str, tuple[int, Any]], sent: list[Any] | None = None) -> Iterator[str]:
    """A server that answers each path in one way.

    Args:
        sent: gets the path and the JSON of each request that has some.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if asked and sent is not None:
                sent.append((self.path, json.loads(asked)))
            status, value = answers.get(self.path, (404, {"error": {"message": "Not Found"}}))
            body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()

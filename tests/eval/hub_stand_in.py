"""A local server that serves dataset files like the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_stand_in(files: Mapping[str, bytes], requests: list[str] | None = None) -> Iterator[str]:
    """Serve ``files`` (``"owner/name/file"`` to content) and give the address for ``HF_ENDPOINT``.

    Each request is appended to ``requests`` as ``"METHOD path"``.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            if requests is not None:
                requests.append(f"{self.command} {self.path}")
            repository, _, rest = self.path.removeprefix("/datasets/").partition("/resolve/")
            content = files.get(f"{repository}/{rest.partition('/')[2]}")
            self.send_response(200 if content is not None else 404)
            self.send_header("X-Repo-Commit", COMMIT)
            if content is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            body = content or b""
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Suppress log lines on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

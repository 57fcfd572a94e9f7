"""A real HTTP server on this machine that keeps what it is sent."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: bytes
    method: str = ""


@dataclass
class Server:
    """url: without a path. answer: returns status and body."""

    url: str
    answer: Callable[[Request], tuple[int, bytes]]
    requests: list[Request] = field(default_factory=list)


@contextlib.contextmanager
def serving(answer: Callable[[Request], tuple[int, bytes]] = lambda request: (200, b"")) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(
                self.path, {name.lower(): value for name, value in self.headers.items()}, body, self.command
            )
            server.requests.append(request)
            status, text = server.answer(request)
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", text.decode())
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(text)

        def do_GET(self) -> None:
            self.do_POST()

        def do_PUT(self) -> None:
            self.do_POST()

        def do_PATCH(self) -> None:
            self.do_POST()

        def log_message(self, *_: object) -> None: ...

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    listener.block_on_close = False
    server = Server(f"http://127.0.0.1:{listener.server_port}", answer)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()

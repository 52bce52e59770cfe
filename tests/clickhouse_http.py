"""ClickHouse's HTTP interface over the embedded engine, for tests: enough of it to carry the client's requests over a real socket.

What it is not: a server's own settings, users, quotas and merges. `KVTIDE_TEST_CLICKHOUSE` runs the store tests against a real one.
"""

from __future__ import annotations

import base64
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import chdb

USER, PASSWORD = "me", "p@ss"
TRANSPORT = {"query", "database", "default_format", "query_id", "compress", "enable_http_compression", "wait_end_of_query", "session_id",
             "client_protocol_version", "send_progress_in_http_headers", "http_headers_progress_interval_ms", "buffer_size"}  # fmt: skip


class Server(ThreadingHTTPServer):
    """`drop` answers so many of the next inserts, after doing them, by closing the connection; `inserts` lists their settings."""

    def __init__(self, folder: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.drop = 0
        self.inserts: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://{USER}:p%40ss@127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)) if "Content-Length" in self.headers else self._chunks())

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, body: bytes) -> None:
        args = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        expected = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {expected}":
            return self._send(403, b"Code: 516. DB::Exception: me: Authentication failed", {"X-ClickHouse-Exception-Code": "516"})
        try:
            result = self._run(args, body)
        except RuntimeError as error:
            text = str(error)
            code = re.search(r"Code: (\d+)", text)
            return self._send(404, text.encode(), {"X-ClickHouse-Exception-Code": code[1] if code else "0"})
        if args.get("query", "").startswith("INSERT") and self.server.drop:
            self.server.drop -= 1
            self.close_connection = True
            return None
        return self._send(200, result, {"X-ClickHouse-Format": args.get("default_format", "TabSeparated")} if result else {})

    def _run(self, args: dict[str, str], body: bytes) -> bytes:
        query = args.get("query", "")
        params = {name[6:]: value for name, value in args.items() if name.startswith("param_")}
        settings = {name: value for name, value in args.items() if name not in TRANSPORT and not name.startswith("param_")}
        connection: Any = chdb.connect(self.server.folder)  # type: ignore[no-untyped-call]
        try:
            connection.query(f"USE `{args.get('database', 'default')}`", "TabSeparated")
            for name, value in sorted(settings.items(), key=lambda item: item[0] == "readonly"):
                connection.query(f"SET {name} = '{value}'", "TabSeparated")
            if insert := re.fullmatch(r"(INSERT INTO .*) FORMAT (\w+)\s*", query, re.DOTALL):
                self.server.inserts.append(settings)
                return _insert(connection, insert[1], insert[2], body)
            text = f"{query}\n{body.decode()}" if query else body.decode()
            return bytes(connection.query(text, args.get("default_format", "TabSeparated"), params=params).bytes() or b"")
        finally:
            connection.close()

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "X-ClickHouse-Summary": "{}"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _insert(connection: Any, head: str, form: str, body: bytes) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".raw") as file:
        file.write(body)
        file.flush()
        connection.query(f"{head} FROM INFILE '{file.name}' FORMAT {form}", "TabSeparated")
    return b""


@contextmanager
def serving(folder: str) -> Iterator[Server]:
    """A running server on a free port over an engine folder that this process may open."""
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

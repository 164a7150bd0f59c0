"""A server that is Hugging Face's hub, ModelScope, S3 and a plain host of files at once. What it is asked is written down."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

CONFIG = b'{"model_type": "llama"}'
WEIGHTS = bytes(range(256)) * 4096 * 3  # 3 MiB
TOKEN = "hf_secret"


class Asked(NamedTuple):
    host: str
    path: str
    offset: int
    authorization: str
    cookie: str


class FakePlaces:
    """`127.0.0.1` is the hub, and `localhost`, another host to every client, where it keeps large files."""

    def __init__(self) -> None:
        self.files = {
            "config.json": CONFIG,
            "model.safetensors": WEIGHTS,
            "README.md": b"no",
            "consolidated.safetensors": b"no",
        }
        self.commit = "a" * 40
        self.stated: dict[str, str] = {}
        """path -> a digest that is not the file's."""
        self.headers: dict[str, str] = {}
        self.token = ""
        self.asked: list[Asked] = []
        self.stops_after: dict[str, int] = {}
        """path -> how many bytes come before nothing does, until `gate` is set."""
        self.breaks_after: dict[str, list[int]] = {}
        """path -> after how many bytes the next connections end."""
        self.gate, self.stopped = threading.Event(), threading.Event()
        self.ranges = True
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bytes_asked(self, path: str) -> list[int]:
        """From which offsets a file was read."""
        return [each.offset for each in self.asked if each.path.endswith(f"/kept/{path}")]

    def sha256(self, path: str) -> str:
        return self.stated.get(path) or hashlib.sha256(self.files[path]).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        content = self.files[path]
        git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        entry: dict[str, Any] = {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": self.stated.get(path) or git,
        }
        if path.endswith((".safetensors", ".gguf")):
            entry["lfs"] = {"oid": self.sha256(path), "size": len(content), "pointerSize": 1}
        return entry

    @contextmanager
    def running(self) -> Iterator["FakePlaces"]:
        places = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                try:
                    places.answer(self)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self.gate.set()
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        url, asks = urlsplit(http.path), http.headers
        offset = int(asks.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        host = asks["Host"].partition(":")[0]
        self.asked.append(
            Asked(host, url.path, offset, asks.get("Authorization", ""), asks.get("Cookie", ""))
        )
        match url.path.strip("/").split("/"):
            case ["kept", *rest]:
                self._send_file(http, "/".join(rest), offset)
            case ["bucket"] if "list-type" in url.query:
                self._list_bucket(http, parse_qs(url.query)["prefix"][0])
            case ["bucket", "folder", *rest]:
                self.headers |= {"ETag": '"e"', "Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT"}
                self._send_file(http, "/".join(rest), offset)
            case _ if self.token and asks.get("Authorization") != f"Bearer {self.token}":
                send(http, 401, {"error": "no"})
            case ["api", "models", "org", "name", *rest] if rest[:1] == ["tree"]:
                send(http, 200, [self.entry(path) for path in self.files])
            case ["api", "models", "org", "name", *_]:
                send(http, 200, {"id": "org/name", "sha": self.commit, "tags": [], "private": False})
            case ["org", "name", "resolve", commit, *rest] if commit == self.commit:
                self._redirect(http, "/".join(rest))
            case ["api", "v1", "models", "org", "name", "repo", "files"]:
                files = [
                    {"Path": path, "Size": len(self.files[path]), "Sha256": self.sha256(path), "Type": "blob"}
                    for path in self.files
                ]
                send(
                    http,
                    200,
                    {
                        "Code": 200,
                        "Data": {"Files": [*files, {"Path": "d", "Size": 0, "Sha256": "", "Type": "tree"}]},
                    },
                )
            case ["api", "v1", "models", "org", "name", "repo"]:
                self._redirect(http, parse_qs(url.query)["FilePath"][0])
            case _:
                send(http, 404, {"error": "not found"})

    def _list_bucket(self, http: BaseHTTPRequestHandler, prefix: str) -> None:
        entries = "".join(
            f"<Contents><Key>{prefix}{path}</Key><Size>{len(content)}</Size><ETag>e</ETag>"
            f"<LastModified>2026-11-30T00:00:00.000Z</LastModified></Contents>"
            for path, content in self.files.items()
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
        http.send_response(200)
        http.send_header("Content-Length", str(len(body)))
        http.end_headers()
        http.wfile.write(body)

    def _redirect(self, http: BaseHTTPRequestHandler, path: str) -> None:
        http.send_response(302)
        http.send_header("Location", f"http://localhost:{self.port}/kept/{path}?signature=secret")
        http.send_header("Content-Length", "0")
        http.end_headers()

    def _send_file(self, http: BaseHTTPRequestHandler, path: str, offset: int) -> None:
        if path not in self.files:
            return send(http, 404, {"error": "not found"})
        content = self.files[path]
        offset = offset if self.ranges else 0
        http.send_response(206 if offset else 200)
        http.send_header("Content-Length", str(len(content) - offset))
        if offset:
            http.send_header("Content-Range", f"bytes {offset}-{len(content) - 1}/{len(content)}")
        for name, value in self.headers.items():
            http.send_header(name, value)
        http.end_headers()
        if http.command == "HEAD":
            return None
        breaks = self.breaks_after.get(path) or [len(content)]
        stops_at = self.stops_after.get(path)
        stop = min(len(content) if stops_at is None else stops_at, breaks.pop(0))
        http.wfile.write(content[offset:stop])
        if stop < len(content):
            if stops_at is not None:
                self.stopped.set()
                self.gate.wait(60)
            http.close_connection = True
        return None


def send(http: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    body = json.dumps(answer).encode()
    http.send_response(status)
    http.send_header("Content-Type", "application/json")
    http.send_header("Content-Length", str(len(body)))
    http.end_headers()
    http.wfile.write(body)

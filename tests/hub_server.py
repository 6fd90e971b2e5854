"""Enough of the hub's protocol, on loopback, for huggingface_hub to list and fetch the files of a local folder."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serves ``root/OWNER/NAME/**`` as repositories; drops the connection in the middle of the first ``drops`` files.

    ``asked`` lists what was downloaded: (file, first byte); ``revisions`` were asked for, ``commit`` is the newest.
    """

    def __init__(self, root: Path, drops: int = 0) -> None:
        self.root, self.drops = root, drops
        self.commit = COMMIT
        self.asked: list[tuple[str, int]] = []
        self.revisions: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").removeprefix("datasets/").split("/")
            if parts[0] == "api":
                self._info("/".join(parts[2:4]))
            elif len(parts) > 4 and parts[2] == "resolve":
                hub.revisions.add(parts[3])
                self._file("/".join(parts[:2]), "/".join(parts[4:]), with_body)
            else:
                self._send(404, b"", {})

        def _info(self, repo: str) -> None:
            folder = hub.root / repo
            if not folder.is_dir():
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return
            files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            siblings = [{"rfilename": file} for file in files]
            answer = {"id": repo, "sha": hub.commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _file(self, repo: str, file: str, with_body: bool) -> None:
            path = hub.root / repo / file
            if not path.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            data = path.read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": hub.commit}
            headers["Accept-Ranges"] = "bytes"
            asked = self.headers.get("Range")
            first = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
            if asked:
                headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            if with_body:
                hub.asked.append((file, first))
            self._send(206 if asked else 200, data[first:], headers, with_body)

        def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool = True) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if not with_body or self.command == "HEAD":
                return
            if "X-Repo-Commit" in headers and hub.drops and len(body) > 1:
                hub.drops -= 1
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
                return
            self.wfile.write(body)

    return Handler

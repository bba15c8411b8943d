"""A server on loopback that speaks as much of the Hub's API as downloading needs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_let_me_in"


class Hub:
    """Repositories by name, each with folders by revision. ``log`` has the method and path of every request."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Path]] = {}
        self.gated: set[str] = set()
        self.log: list[tuple[str, str]] = []
        self.broken: set[str] = set()
        """Files of which only half is sent before the connection closes."""
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def downloads(self) -> list[str]:
        """The files that were sent, in the order of the requests."""
        return [path.rsplit("/", 1)[1] for method, path in self.log if method == "GET" and "/resolve/" in path]


def commit_of(repo: str, revision: str) -> str:
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server_hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        hub.log.append((self.command, path))
        found = re.fullmatch(
            r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<revision>[^/]+)/?"
            r"|/api/models/(?P<bare>[^/]+/[^/]+)"
            r"|/(?P<file_repo>[^/]+/[^/]+)/resolve/(?P<file_revision>[^/]+)/(?P<file>.+)",
            path,
        )
        if found is None:
            self._fail(404, "EntryNotFound")
            return
        parts = found.groupdict()
        repo = parts["repo"] or parts["bare"] or parts["file_repo"]
        revision = parts["revision"] or parts["file_revision"] or "main"
        revisions = hub.repos.get(repo)
        if revisions is None:
            self._fail(404, "RepoNotFound")
            return
        allowed = repo not in hub.gated or self.headers.get("Authorization") == f"Bearer {TOKEN}"
        named = {**revisions, **{commit_of(repo, name): folder for name, folder in revisions.items()}}
        if revision not in named:
            self._fail(404, "RevisionNotFound")
            return
        folder = named[revision]
        name = revision if revision not in revisions else commit_of(repo, revision)
        if parts["file"] is None:
            self._list(repo, name, folder, parts["what"] == "tree")
        elif not allowed:
            self._fail(401, "GatedRepo")
        elif not (folder / parts["file"]).is_file():
            self._fail(404, "EntryNotFound", name)
        else:
            self._send_file(folder / parts["file"], name, body)

    def _list(self, repo: str, commit: str, folder: Path, tree: bool) -> None:
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        if tree:
            entries = [
                {"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": _etag(folder / n)}
                for n in files
            ]
            self._send_json(entries)
        else:
            self._send_json({"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]})

    def _send_json(self, data: Any) -> None:
        content = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_file(self, path: Path, commit: str, body: bool) -> None:
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body and path.name in self.server_hub.broken:
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif body:
            self.wfile.write(content)

    def _fail(self, status: int, code: str, commit: str | None = None) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()

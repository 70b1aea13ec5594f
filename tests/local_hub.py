"""A server on loopback that speaks the hub's routes for folders and files made by a test.

Routes as huggingface_hub 1.31 and 2.4 call them: GET /api/models/ID/revision/REV, GET
/api/models/ID/tree/SHA, HEAD and GET /ID/resolve/REV/FILE. Large files are answered with a
redirect, as the hub does for those in its object store.
"""

import hashlib
import json
import threading
import urllib.parse
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

LARGE = 2**16  # from here on a file is in the object store
TOKEN = "hf_local_token"


@dataclass(kw_only=True)
class Repo:
    """A repository: file -> bytes of main, and of other branches."""

    files: dict[str, bytes]
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False  # its files need TOKEN
    private: bool = False  # everything needs TOKEN, and it does not exist without

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch or commit."""
        for name, files in {"main": self.files, **self.branches}.items():
            if revision in (name, commit_of(files)):
                return commit_of(files), files
        return None


def commit_of(files: dict[str, bytes]) -> str:
    whole = hashlib.sha1()
    for name in sorted(files):
        whole.update(name.encode() + hashlib.sha1(files[name]).digest())
    return whole.hexdigest()


def files_of(folder: Path) -> dict[str, bytes]:
    """Files of a folder by their path in it."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@dataclass(kw_only=True)
class LocalHub:
    """The running server. A test changes `repos` and `status`, and reads `requests`."""

    url: str
    repos: dict[str, Repo]
    requests: list[tuple[str, str]] = field(default_factory=list)  # method, path
    status: int | None = None  # answer this to every request
    num_cuts: int = 0  # how many answers with a large file break off in the middle
    surplus: bytes = b""  # sent after a large file

    def fetched(self) -> set[str]:
        """Names of the files whose bytes were requested."""
        paths = [path for method, path in self.requests if method == "GET" and "/resolve/" in path]
        return {
            urllib.parse.unquote(path.split("/resolve/")[1].partition("/")[2]) for path in paths
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = urllib.parse.urlsplit(self.path).path
        self.hub.requests.append((self.command, path))
        if self.hub.status is not None:
            return self._send(self.hub.status, b"{}")
        parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
        if parts[0] == "store":
            return self._content(bytes.fromhex(parts[1]))
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        owner, name, kind, revision = [*parts, "", ""][:4]
        repo = self.hub.repos.get(f"{owner}/{name}")
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not has_token):
            return self._fail(401 if not has_token else 404, "RepoNotFound", "Repository Not Found")
        found = repo.at(revision or "main")
        if found is None:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        commit, files = found
        if is_api and kind in ("", "revision"):
            siblings = [{"rfilename": n, "size": len(files[n])} for n in sorted(files)]
            info = {"_id": "0", "id": f"{owner}/{name}", "modelId": f"{owner}/{name}"}
            info |= {"sha": commit, "siblings": siblings, "tags": [], "private": repo.private}
            return self._send(200, json.dumps(info).encode())
        if is_api and kind == "tree":
            return self._send(200, json.dumps([_item(n, files[n]) for n in sorted(files)]).encode())
        if repo.gated and not has_token:
            return self._fail(401, "GatedRepo", "Access to this model is restricted")
        file = "/".join(parts[4:])
        if file not in files:
            return self._fail(404, "EntryNotFound", "Entry not found")
        content = files[file]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(content)}"'}
        if len(content) < LARGE:
            return self._send(200, content, headers)
        digest = hashlib.sha256(content)
        headers |= {"X-Linked-ETag": f'"{digest.hexdigest()}"', "X-Linked-Size": str(len(content))}
        key = json.dumps([owner, name, commit, file]).encode().hex()
        # Another host, as the hub's store is: clients follow it for the bytes, not for the facts.
        store = self.hub.url.replace("127.0.0.1", "localhost")
        headers["Location"] = f"{store}/store/{key}"
        return self._send(302, b"", headers)

    def _content(self, key):
        owner, name, commit, file = json.loads(key)
        content = self.hub.repos[f"{owner}/{name}"].at(commit)[1][file] + self.hub.surplus
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        size, content = len(content), content[first:]
        status, headers = 200, {}
        if first:
            status, headers = 206, {"Content-Range": f"bytes {first}-{size - 1}/{size}"}
        if not self.hub.num_cuts:
            return self._send(status, content, headers)
        self.hub.num_cuts -= 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True

    def _fail(self, status, code, message):
        return self._send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code})

    def _send(self, status, content, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    """git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _item(name: str, content: bytes) -> dict[str, object]:
    item: dict[str, object] = {"type": "file", "path": name, "size": len(content)}
    item["oid"] = _oid(content)
    if len(content) >= LARGE:
        digest = hashlib.sha256(content).hexdigest()
        item["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return item


@contextmanager
def running(repos: dict[str, Repo]):
    """Run a hub with these repositories."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.hub = LocalHub(url=f"http://127.0.0.1:{server.server_port}", repos=repos)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield handler.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def in_place_of_the_hub(repos: dict[str, Repo], home: Path):
    """Run a hub that this process and its children ask, with an empty cache in `home`."""
    from huggingface_hub import constants

    with running(repos) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(home))
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)
        # The client has read the environment when it was imported.
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub

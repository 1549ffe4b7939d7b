"""A hub on the loopback address: the endpoints that huggingface_hub uses to create a model repository and to push into it, with git's and
LFS's digests. Uploads through Xet are written to a folder by hf_xet's local storage."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_test"


class Hub:
    """The hub's content, the requests that it received, and the requests that it refuses."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self.url = ""
        self.repositories: dict[str, dict[str, str]] = {}
        """The digest of each file by repository and path: git's for small files, sha256 for large ones."""
        self.texts: dict[str, bytes] = {}
        """The contents of small files, by path."""
        self.objects: dict[str, bytes] = {}
        """The objects that were uploaded through LFS, by sha256."""
        self.created: list[dict[str, Any]] = []
        self.commits: list[tuple[str, list[str]]] = []
        """The message and the paths of each commit."""
        self.sent: list[str] = []
        """The sha256 of each uploaded object, once per upload."""
        self.refuse = ""
        """A part of a path; requests to paths that contain it fail."""
        self.allow = 0
        """The number of these requests that succeed first."""

    def refuses(self, path: str) -> bool:
        if not self.refuse or self.refuse not in path:
            return False
        self.allow -= 1
        return self.allow < 0


def _digest_of_text(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        pass

    def _answer(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _handle(self) -> None:
        path, hub = self.path.partition("?")[0], self.hub
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if hub.refuses(path):
            return self._answer({"error": "storage is full"}, 403)
        if path.startswith("/storage/"):  # signed addresses, without a token
            digest = hashlib.sha256(body).hexdigest()
            assert path == f"/storage/{digest}"
            hub.objects[digest] = body
            hub.sent.append(digest)
            return self._answer({})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid credentials in Authorization header"}, 401)
        if path == "/api/validate-yaml":  # the model card, before its upload
            assert json.loads(body)["content"].startswith("---")
            return self._answer({"errors": [], "warnings": []})
        if path == "/api/whoami-v2":
            return self._answer({"type": "user", "name": "me", "auth": {}})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith("/info/lfs/objects/batch"):
            return self._answer(
                {"transfer": "basic", "objects": [self._action(each) for each in json.loads(body)["objects"]]}
            )
        _, _, _, user, name, action, *_ = [*path.split("/"), ""]
        return self._in_repository(f"{user}/{name}", action, body)

    do_GET = do_POST = do_PUT = _handle

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request.get('organization') or 'me'}/{request['name']}"
        self.hub.created.append(request)
        exists = name in self.hub.repositories
        self.hub.repositories.setdefault(name, {})
        address = {"url": f"{self.hub.url}/{name}"}
        self._answer(
            address | ({"error": "You already created this model repo"} if exists else {}), 409 if exists else 200
        )

    def _action(self, each: dict[str, Any]) -> dict[str, Any]:
        upload = {"upload": {"href": f"{self.hub.url}/storage/{each['oid']}", "header": {}}}
        return each if each["oid"] in self.hub.objects else each | {"actions": upload}

    def _in_repository(self, name: str, action: str, body: bytes) -> None:
        if name not in self.hub.repositories:
            return self._answer({"error": "Repository not found"}, 404)
        files = self.hub.repositories[name]
        if action == "preupload":
            entries = json.loads(body)["files"]
            kinds = {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in entries}
            return self._answer(
                {
                    "files": [
                        {"path": p, "uploadMode": k, "shouldIgnore": False, "oid": files.get(p)}
                        for p, k in kinds.items()
                    ]
                }
            )
        if action == "xet-write-token":
            return self._answer(
                {"casUrl": f"local://{self.hub.storage}", "exp": int(time.time()) + 3600, "accessToken": "x"}
            )
        if action == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines[1:]:
                self._commit(files, line["key"], line["value"])
            self.hub.commits.append((lines[0]["value"]["summary"], [line["value"]["path"] for line in lines[1:]]))
            digest = f"{len(self.hub.commits):040x}"
            return self._answer({"commitUrl": f"{self.hub.url}/{name}/commit/{digest}", "commitOid": digest})
        return self._answer({"id": name, "sha": f"{len(self.hub.commits):040x}", "siblings": []})

    def _commit(self, files: dict[str, str], kind: str, value: dict[str, Any]) -> None:
        if kind == "file":
            content = base64.b64decode(value["content"])
            self.hub.texts[value["path"]] = content
            files[value["path"]] = _digest_of_text(content)
        else:
            assert kind == "lfsFile"
            files[value["path"]] = value["oid"]


@contextlib.contextmanager
def serving(storage: Path) -> Iterator[Hub]:
    """A hub that is served while the block runs."""
    hub = Hub(storage)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

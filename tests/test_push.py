"""`suture push`: what is refused, what a dry run lists, and what arrives at a hub that runs here on loopback."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from cards import write_export
from typer.testing import CliRunner

from suture.cli import app
from suture.errors import ModelError, SutureError
from suture.push import local_paths, plan_push

TOKEN = "hf_" + "x" * 34
FILES = ["README.md", "config.json", "figures/scores.png", "model.safetensors", "suture.json", "tokenizer.json"]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return write_export(tmp_path / "export")


def call(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["push", *arguments])
    assert result.exit_code == code, result.output
    return result


# Before anything is sent


def test_a_dry_run_lists_what_would_be_sent_and_connects_to_nothing(export, monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    (export / "__pycache__").mkdir()
    (export / "__pycache__" / "modeling.pyc").write_bytes(b"left by Python")
    found = json.loads(call(str(export), "org/name", "--dry-run", "--json").stdout)
    assert list(found["files"]) == FILES
    assert found["files"] == {name: (export / name).stat().st_size for name in FILES}
    assert found["bytes"] == sum(found["files"].values())
    assert (found["repository"], found["private"], found["branch"]) == ("org/name", True, "main")
    text = call(str(export), "org/name", "--dry-run", "--public", "--branch", "v2", "-m", "First").stdout
    assert all(name in text for name in FILES)
    assert "org/name, public, branch v2" in text
    assert "commit: First" in text
    assert "nothing was sent" in text


@pytest.mark.parametrize(
    "name", ["name", "a/b/c", "org/na me", "org/-name", "org/a--b", "org/a..b", "org/", "org/x.git"]
)
def test_a_malformed_name_of_a_repository(export, name):
    with pytest.raises(SutureError, match="no name for a repository"):
        plan_push(export, name)


def test_what_is_no_export(tmp_path, checkpoint):
    with pytest.raises(ModelError, match=r"no suture\.json"):
        plan_push(checkpoint("plain"), "org/name")
    with pytest.raises(ModelError, match="no such folder"):
        plan_push(tmp_path / "nowhere", "org/name")
    with pytest.raises(ModelError, match="failed its verification"):
        plan_push(write_export(tmp_path / "x.failed"), "org/name")


def test_an_export_that_was_not_verified(tmp_path):
    export = write_export(tmp_path / "export", verified=[])
    with pytest.raises(ModelError, match="was not verified"):
        plan_push(export, "org/name")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "adapters/code/adapter_model.pt", "optimizer.pth", ".env", "notes.docx", "model.npz"]
)
def test_files_that_do_not_belong(export, name):
    (export / name).parent.mkdir(parents=True, exist_ok=True)
    (export / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=re.escape(name)):
        plan_push(export, "org/name")


def test_weights_that_nothing_loads(tmp_path):
    from handmade import write_checkpoint

    export = write_export(tmp_path / "export")
    (export / "model.safetensors").unlink()
    for file in write_checkpoint(tmp_path / "sharded", shards=2).glob("model*"):
        file.rename(export / file.name)
    assert len(plan_push(export, "org/name").files) == len(FILES) + 2
    (export / "old.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"does not name: old\.safetensors"):
        plan_push(export, "org/name")
    (export / "old.safetensors").unlink()
    next(export.glob("model-00001*")).unlink()
    with pytest.raises(ModelError, match="lacks 1 of its 2 shards"):
        plan_push(export, "org/name")


@pytest.mark.parametrize("name", ["suture.json", "README.md", "config.json", "adapters/code/adapter_config.json"])
def test_places_on_this_machine_are_named_with_file_and_line(export, tmp_path, name):
    (export / name).parent.mkdir(parents=True, exist_ok=True)
    place = f"{tmp_path}/base"
    if name == "README.md":
        text = (export / name).read_text() + f"See {place}.\n"
    else:
        kept = json.loads((export / name).read_text()) if (export / name).exists() else {}
        text = json.dumps({**kept, "base_model_name_or_path": place}, indent=2)
    (export / name).write_text(text)
    (line,) = [number for number, each in enumerate(text.splitlines(), 1) if place in each]
    with pytest.raises(ModelError, match=rf"{re.escape(name)}, line {line}: {re.escape(place)};"):
        plan_push(export, "org/name")


def test_a_token_in_a_text_is_refused_and_not_repeated(export):
    (export / "README.md").write_text(f"---\nlicense: mit\n---\nexport HF_TOKEN={TOKEN}\n")
    with pytest.raises(ModelError, match=r"README\.md, line 4") as error:
        plan_push(export, "org/name")
    assert TOKEN not in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        "/home/me/models/x",
        "in `/Users/me/x`,",
        "path:/mnt/disk/x",
        "pretrained=/scratch/me/x,y",
        "~/models",
        "file:///x",
    ],
)
def test_lines_with_local_paths(line):
    assert len(local_paths(line)) == 1


def test_windows_paths_in_texts_and_in_json():
    assert local_paths(r"C:\Users\me\model") == ["C:\\Users\\"]
    assert local_paths(json.dumps(r"C:\Users\me\model"), escaped=True) == [r"C:\\Users\\"]
    assert local_paths(json.dumps("Q:\nfoo\nbar"), escaped=True) == []


@pytest.mark.parametrize(
    "line",
    [
        *("https://huggingface.co/home/x", "http://localhost:8000/v1/completions", "POST /v1/chat/completions"),
        *("</s> a/b/c", "org/name", "adapters/code", "9/9 and/or", "~ 5", "../prompts/x.jsonl", "/no_think"),
    ],
)
def test_lines_without_local_paths(line):
    assert local_paths(line) == []


def test_a_card_without_licence_is_worth_a_note(export):
    assert plan_push(export, "org/name").notes == ()
    (export / "README.md").write_text("# No front matter\n")
    assert "states no licence" in plan_push(export, "org/name").notes[0]
    assert "note: README.md states no licence" in call(str(export), "org/name", "--dry-run").stderr
    (export / "README.md").unlink()
    assert "no model card" in plan_push(export, "org/name").notes[0]


def test_errors_are_told_as_json_too(tmp_path):
    found = json.loads(call(str(tmp_path / "nowhere"), "org/name", "--json", code=1).stdout)
    assert found["error"]["type"] == "ModelError"


# A hub on loopback


class Hub(ThreadingHTTPServer):
    """As much of the hub's protocol as the client needs to make a repository and commit to it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.tokens: dict[str, str | None] = {}
        self.made: list[dict[str, Any]] = []
        self.commits: list[dict[str, Any]] = []
        self.denied = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, name: str, private: bool = True, **files: bytes) -> None:
        self.repositories[name] = {"private": private, "branches": {"main": dict(files)}}

    def run(self, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        env = {**kept, "HF_ENDPOINT": self.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", **environment}
        command = [sys.executable, *(arguments if arguments[0] == "-c" else ("-m", "suture.cli", "push", *arguments))]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stdout + done.stderr
        assert TOKEN not in done.stdout + done.stderr
        return done


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, value: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for key, content in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), content)
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def handle_any(self) -> None:
        hub, body = self.server, self.body()
        path = unquote(self.path.partition("?")[0])
        hub.requests.append((self.command, path))
        if path.startswith("/lfs/"):
            hub.blobs[path.removeprefix("/lfs/")] = body
            return self.answer({})
        hub.tokens[path] = self.headers.get("Authorization")
        if hub.denied:
            return self.answer({"error": "You don't have the rights"}, 403)
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            hub.made.append(asked := json.loads(body))
            name = f"{asked['organization']}/{asked['name']}"
            hub.add(name, asked.get("visibility") == "private" or asked.get("private") is True)
            return self.answer({"url": f"{hub.address}/{name}"})
        known = re.match(r"/(?:api/models/)?([\w.-]+/[\w.-]+?)(?:\.git)?(?:/(.*))?$", path)
        if known is None or known[1] not in hub.repositories:
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        self.in_repository(known[1], known[2] or "", body)

    def in_repository(self, name: str, rest: str, body: bytes) -> None:
        hub, repository = self.server, self.server.repositories[name]
        action, _, branch = rest.partition("/")
        if not action:
            card = {"license": "other", "license_name": "own"}
            known = {"id": name, "private": repository["private"], "sha": "0" * 40, "tags": [], "downloads": 0}
            return self.answer({**known, "cardData": card})
        if action == "branch":
            repository["branches"][branch] = dict(repository["branches"]["main"])
            return self.answer({})
        if action == "info":
            return self.answer(
                {"transfer": "basic", "objects": [self.slot(each) for each in json.loads(body)["objects"]]}
            )
        files = repository["branches"][branch]
        if action in ("tree", "revision"):
            return self.answer([{"type": "file", "path": each, "oid": "0", "size": 1} for each in files])
        if action == "preupload":
            return self.answer({"files": [self.mode(each["path"]) for each in json.loads(body)["files"]]})
        assert action == "commit", rest
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        hub.commits.append({"branch": branch, "summary": lines[0]["value"]["summary"]})
        self.answer({"commitOid": "c" * 40, "commitUrl": f"{hub.address}/{name}/commit/{'c' * 40}", "success": True})

    def slot(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Where to put a large file; nowhere if it is there."""
        if wanted["oid"] in self.server.blobs:
            return wanted
        return {**wanted, "actions": {"upload": {"href": f"{self.server.address}/lfs/{wanted['oid']}"}}}

    @staticmethod
    def mode(path: str) -> dict[str, Any]:
        large = path.endswith((".safetensors", ".png"))
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

    do_GET = do_POST = do_PUT = handle_any


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_exactly_the_listed_files_arrive_in_one_commit_of_a_private_repository(export, hub):
    done = json.loads(hub.run(str(export), "org/name", "--message", "Mine", "--json").stdout)
    assert list(hub.repositories) == ["org/name"]
    assert hub.repositories["org/name"]["private"] is True
    (asked,) = hub.made
    assert asked.get("visibility") == "private" or asked.get("private") is True
    expected = {name: (export / name).read_bytes() for name in FILES}
    expected["README.md"] = expected["README.md"].replace(b"THIS_MODEL", b"org/name")
    assert b"org/name" in expected["README.md"]
    assert hub.repositories["org/name"]["branches"] == {"main": expected}
    assert hub.commits == [{"branch": "main", "summary": "Mine"}]
    sent = {token for path, token in hub.tokens.items() if path.startswith(("/api/models/", "/api/repos/", "/org/"))}
    assert sent == {f"Bearer {TOKEN}"}
    assert (done["url"], done["commit"], done["created"]) == (f"{hub.address}/org/name", "c" * 40, True)
    assert list(done["files"]) == FILES


def test_an_older_export_is_replaced_and_what_has_arrived_is_not_sent_again(export, hub):
    old = {"suture.json": b"{}", "model-00001-of-00002.safetensors": b"", "adapters/code/adapter_config.json": b"{}"}
    hub.add("org/name", False, **old, **{"notes.txt": b"mine"})
    weights = (export / "model.safetensors").read_bytes()
    hub.blobs[hashlib.sha256(weights).hexdigest()] = weights
    said = hub.run(str(export), "org/name", "--public", "--branch", "v2").stdout
    assert said.startswith(f"{hub.address}/org/name   (public, 6 files")
    branches = hub.repositories["org/name"]["branches"]
    assert sorted(branches["v2"]) == sorted([*FILES, "notes.txt"])
    assert branches["v2"]["model.safetensors"] == weights
    assert sorted(branches["main"]) == sorted([*old, "notes.txt"])
    assert [path for command, path in hub.requests if command == "PUT"] == [
        f"/lfs/{hashlib.sha256((export / 'figures' / 'scores.png').read_bytes()).hexdigest()}"
    ]
    assert len(hub.commits) == 1
    assert hub.made == []


def test_a_repository_of_the_other_visibility_or_with_other_weights_is_left_alone(export, hub):
    hub.add("org/open", private=False)
    hub.add("org/closed", private=True)
    hub.add("org/other", private=True, **{"pytorch_model.bin": b"x"})
    assert "is there and public, but private was asked for" in hub.run(str(export), "org/open", code=1).stderr
    assert "is there and private" in hub.run(str(export), "org/closed", "--public", code=1).stderr
    assert "no export of suture (pytorch_model.bin)" in hub.run(str(export), "org/other", code=1).stderr
    assert hub.commits == hub.made == []


def test_without_a_token_offline_and_without_the_right(export, hub, tmp_path):
    assert "hf auth login" in hub.run(str(export), "org/name", code=1, HF_TOKEN="", HF_HOME=str(tmp_path)).stderr
    assert "HF_HUB_OFFLINE is set" in hub.run(str(export), "org/name", code=1, HF_HUB_OFFLINE="1").stderr
    assert hub.requests == []
    hub.denied = True
    assert "may your token write to org?" in hub.run(str(export), "org/name", code=1).stderr
    assert hub.commits == []


def test_a_failed_upload_says_how_to_go_on(export, hub):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert "run the same command again" in hub.run(str(export), "org/name", code=1, HF_ENDPOINT=address).stderr


def test_licences_are_asked_for_at_the_hub_which_need_not_know(hub, tmp_path):
    hub.add("org/known")
    code = "from suture.export.public import licences_of; print(licences_of(['org/known', 'org/unknown']))"
    said = hub.run("-c", code, HF_HOME=str(tmp_path)).stdout
    assert said.strip() == str({"org/known": "other (own)", "org/unknown": None})
    assert ("GET", "/api/models/org/unknown") in hub.requests

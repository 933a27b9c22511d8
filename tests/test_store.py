"""Artifacts are whole or absent, and named by what made them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from suture.errors import ResourceError, StoreError
from suture.store import FileHashes, Store, digest, home, need_disk, replaced_folder, versions, write_json, write_text

INPUTS = {"model": "abc", "steps": 3}


def python(code: str, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-c", code, *arguments], timeout=60).returncode


def test_home_is_the_variable_or_the_users_cache(monkeypatch):
    monkeypatch.setenv("SUTURE_HOME", "/somewhere/else")
    assert home() == Path("/somewhere/else")
    monkeypatch.setenv("SUTURE_HOME", "")
    monkeypatch.setenv("HOME", "/users/ann")
    assert home() == Path("/users/ann/.cache/suture")
    monkeypatch.setenv("SUTURE_HOME", "~/big")
    assert home() == Path("/users/ann/big")


def test_digest_is_sha256_of_sorted_json():
    text = b'{"a":[1,2],"b":{"c":"\\u00e9","d":null}}'
    expected = hashlib.sha256(text).hexdigest()
    assert digest({"b": {"d": None, "c": "é"}, "a": [1, 2]}) == expected
    assert digest({"a": [1, 2], "b": {"c": "é", "d": None}}) == expected
    assert digest({"a": [2, 1], "b": {"c": "é", "d": None}}) != expected


def test_keys_depend_on_kind_and_inputs_but_not_on_their_order(tmp_path):
    store = Store(tmp_path)
    key = store.key("states", INPUTS)
    assert len(key) == 24
    assert set(key) <= set("0123456789abcdef")
    assert key == store.key("states", {"steps": 3, "model": "abc"})
    others = [
        store.key("bias", INPUTS),
        store.key("states", {**INPUTS, "steps": 4}),
        store.key("states", {**INPUTS, "more": None}),
        store.key("states", {"model": "abc"}),
    ]
    assert len({key, *others}) == 5


def test_the_default_root_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("SUTURE_HOME", str(tmp_path))
    assert Store().root == tmp_path / "store"


def test_an_artifact_is_found_by_what_made_it(tmp_path):
    store = Store(tmp_path)
    assert store.find("states", INPUTS) is None
    with store.create("states", INPUTS) as folder:
        (folder / "data").write_text("seven")
        assert store.find("states", INPUTS) is None
    found = Store(tmp_path).get("states", {"steps": 3, "model": "abc"})
    assert found.path == tmp_path / "states" / found.key
    assert (found.path / "data").read_text() == "seven"
    assert found.spec["inputs"] == INPUTS
    assert found.spec["kind"] == "states"
    assert found.spec["versions"]["python"] == platform.python_version()
    assert found.spec["versions"]["suture"] == versions()["suture"]
    assert found.path.stat().st_mode & 0o777 == 0o755
    assert [(each.kind, each.key) for each in store.list()] == [("states", found.key)]


def test_a_missing_artifact_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"the states artifact [0-9a-f]{24} is gone from .*: run again"):
        Store(tmp_path).get("states", INPUTS)


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_nothing(tmp_path, stop):
    store = Store(tmp_path)
    with pytest.raises(stop), store.create("states", INPUTS) as folder:  # noqa: PT012
        (folder / "data").write_text("half")
        raise stop
    assert store.find("states", INPUTS) is None
    assert list((tmp_path / "states").iterdir()) == []


def test_the_list_is_oldest_first_and_leaves_out_what_is_not_finished(tmp_path):
    store = Store(tmp_path)
    for step in range(3):
        with store.create("states", {"step": step}):
            pass
        os.utime(store.get("states", {"step": step}).path / "spec.json", (1000 - step, 1000 - step))
    assert [each.spec["inputs"]["step"] for each in store.list()] == [2, 1, 0]
    with store.create("states", {"step": 3}) as folder:
        write_json(folder / "spec.json", {})
        assert len(store.list()) == 3


DIE = """
import os, sys
from pathlib import Path
from suture.store import Store
with Store(Path(sys.argv[1])).create("states", {"step": 0}) as folder:
    (folder / "data").write_text("half")
    os._exit(3)
"""


def test_what_a_killed_process_left_is_swept_by_the_next(tmp_path):
    assert python(DIE, str(tmp_path)) == 3
    left = list((tmp_path / "states").iterdir())
    assert [(path / "data").read_text() for path in left] == ["half"]
    store = Store(tmp_path)
    assert store.list() == []
    assert store.find("states", {"step": 0}) is None
    with store.create("states", {"step": 1}):
        pass
    assert [path.name for path in (tmp_path / "states").iterdir()] == [store.key("states", {"step": 1})]


WAIT = """
import sys
from pathlib import Path
from suture.store import Store
with Store(Path(sys.argv[1])).create("states", {"step": 0}) as folder:
    (folder / "data").write_text("mine")
    print("ready", flush=True)
    sys.stdin.readline()
"""


def waiting(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_work_of_a_living_process_is_not_swept(tmp_path):
    process = waiting(tmp_path)
    try:
        with Store(tmp_path).create("states", {"step": 1}):
            pass
        process.communicate("\n", timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert (Store(tmp_path).get("states", {"step": 0}).path / "data").read_text() == "mine"


def test_work_of_another_machine_on_a_shared_disk_is_not_swept(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    theirs = tmp_path / "states" / f".another-host-{gone.pid}-abcd1234"
    ours = tmp_path / "states" / f".{platform.node()}-{gone.pid}-abcd1234"
    theirs.mkdir(parents=True)
    ours.mkdir()
    with Store(tmp_path).create("states", INPUTS):
        pass
    assert theirs.exists()
    assert not ours.exists()


def test_two_processes_may_make_the_same_artifact(tmp_path):
    process = waiting(tmp_path)
    store = Store(tmp_path)
    try:
        with store.create("states", {"step": 0}) as folder:
            (folder / "data").write_text("first")
        process.communicate("\n", timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert (store.get("states", {"step": 0}).path / "data").read_text() == "first"
    assert len(list((tmp_path / "states").iterdir())) == 1


def test_an_artifact_that_somebody_half_deleted_is_made_again(tmp_path):
    store = Store(tmp_path)
    for text in ("old", "new"):
        with store.create("states", INPUTS) as folder:
            (folder / "data").write_text(text)
        path = store.get("states", INPUTS).path
        if text == "old":
            (path / "spec.json").unlink()
            assert store.find("states", INPUTS) is None
    assert (path / "data").read_text() == "new"


def test_text_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "new" / "scores.json"
    write_text(file, "naïve\n")
    assert file.read_bytes() == "naïve\n".encode()
    assert file.stat().st_mode & 0o777 == 0o644
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "half \ud800")
    assert file.read_bytes() == "naïve\n".encode()
    assert [path.name for path in file.parent.iterdir()] == ["scores.json"]


def test_readers_never_see_half_a_file(tmp_path):
    file = tmp_path / "scores.json"
    texts = {letter * 200_000 for letter in "ab"}
    write_text(file, min(texts))
    seen: set[str] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(file.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        for text in texts:
            write_text(file, text)
    stop.set()
    reader.join()
    assert seen <= texts


def test_json_is_readable_and_ends_in_a_newline(tmp_path):
    write_json(tmp_path / "a.json", {"b": "é", "a": [1]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"b": "é", "a": [1]}
    assert "é" in text
    assert text.endswith("}\n")


def test_disk_space_is_refused_with_both_figures(tmp_path):
    need_disk(tmp_path / "not" / "there" / "yet", 1, "nothing much")
    with pytest.raises(ResourceError) as told:
        need_disk(tmp_path / "not" / "there", 123_456_000_000_000_000, "the merged checkpoint")
    start = r"the merged checkpoint needs 123456000\.00 GB on the disk of .*there, which has (\d+\.\d\d) GB free: "
    found = re.match(start + ".*SUTURE_HOME", str(told.value))
    assert found is not None, str(told.value)
    statistics = os.statvfs(tmp_path)
    assert float(found[1]) == pytest.approx(statistics.f_bavail * statistics.f_frsize / 1e9, abs=2)


def test_a_folder_is_replaced_only_when_the_new_one_is_whole(tmp_path):
    place = tmp_path / "out" / "merged"
    with replaced_folder(place) as work:
        (work / "one").write_text("1")
        assert not place.exists()
    assert (place / "one").read_text() == "1"
    assert place.stat().st_mode & 0o777 == 0o755
    with pytest.raises(ValueError, match="disk on fire"), replaced_folder(place) as work:  # noqa: PT012
        (work / "two").write_text("2")
        raise ValueError("disk on fire")
    assert [path.name for path in place.iterdir()] == ["one"]
    with replaced_folder(place) as work:
        (work / "two").write_text("2")
    assert [path.name for path in place.iterdir()] == ["two"]
    assert [path.name for path in place.parent.iterdir()] == ["merged"]


def test_a_file_in_the_way_is_refused_before_any_work(tmp_path):
    file = tmp_path / "merged"
    file.write_text("mine")
    with pytest.raises(StoreError, match="merged is a file where a folder should be written"), replaced_folder(file):
        pytest.fail("work was done")
    assert file.read_text() == "mine"


def test_behind_a_link_the_folder_is_replaced(tmp_path):
    (tmp_path / "disk" / "merged").mkdir(parents=True)
    link = tmp_path / "merged"
    link.symlink_to(tmp_path / "disk" / "merged")
    with replaced_folder(link) as work:
        (work / "new").write_text("1")
    assert link.is_symlink()
    assert (tmp_path / "disk" / "merged" / "new").read_text() == "1"


SWAP = """
import os, sys
from pathlib import Path
from suture.store import replaced_folder
kept = Path.rename
def rename(self, target):
    done = kept(self, target)
    os.kill(os.getpid(), 9)  # after the first of the two renames: the worst moment
Path.rename = rename
with replaced_folder(Path(sys.argv[1])) as work:
    (work / "new").write_text("new")
"""


def test_a_process_killed_while_it_swaps_loses_neither_folder(tmp_path):
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "old").write_text("old")
    assert python(SWAP, str(tmp_path / "merged")) == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["new", "old"]


def large(path: Path, letter: bytes) -> str:
    path.write_bytes(letter * 1_100_000)
    return hashlib.sha256(letter * 1_100_000).hexdigest()


def test_file_hashes_are_sha256_of_the_content(tmp_path):
    hashes = FileHashes(tmp_path / "hashes.json")
    small = tmp_path / "small"
    small.write_bytes(b"weights")
    assert hashes.of(small) == hashlib.sha256(b"weights").hexdigest()
    expected = large(tmp_path / "big", b"a")
    assert hashes.of(tmp_path / "big") == expected
    (tmp_path / "link").symlink_to(tmp_path / "big")
    assert hashes.of(tmp_path / "link") == expected


def test_a_changed_file_gets_another_hash(tmp_path):
    hashes = FileHashes(tmp_path / "hashes.json")
    for letter in (b"a", b"b"):
        expected = large(tmp_path / "big", letter)
        assert hashes.of(tmp_path / "big") == expected
        assert FileHashes(tmp_path / "hashes.json").of(tmp_path / "big") == expected
    assert len(json.loads((tmp_path / "hashes.json").read_text())) == 2


def test_a_remembered_hash_is_not_computed_again(tmp_path):
    file = tmp_path / "big"
    large(file, b"a")
    FileHashes(tmp_path / "hashes.json").of(file)
    known = json.loads((tmp_path / "hashes.json").read_text())
    (mark,) = known
    (tmp_path / "hashes.json").write_text(json.dumps({mark: "remembered"}))
    assert FileHashes(tmp_path / "hashes.json").of(file) == "remembered"


def test_small_files_are_not_written_down(tmp_path):
    (tmp_path / "small").write_bytes(b"x")
    FileHashes(tmp_path / "hashes.json").of(tmp_path / "small")
    assert not (tmp_path / "hashes.json").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": 1'])
def test_a_broken_memory_is_forgotten(tmp_path, content):
    (tmp_path / "hashes.json").write_text(content)
    expected = large(tmp_path / "big", b"a")
    assert FileHashes(tmp_path / "hashes.json").of(tmp_path / "big") == expected


def test_the_hubs_cache_names_large_files_by_their_hash(tmp_path):
    blob = tmp_path / "models--org--name" / "blobs" / ("ab" * 32)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"any")
    snapshot = tmp_path / "models--org--name" / "snapshots" / "main" / "model.safetensors"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(blob)
    assert FileHashes(tmp_path / "hashes.json").of(snapshot) == "ab" * 32
    small = blob.with_name("cd" * 20)  # git's own hash: not of the content alone
    small.write_bytes(b"{}")
    assert FileHashes(tmp_path / "hashes.json").of(small) == hashlib.sha256(b"{}").hexdigest()

"""An export folder to the hub: what would be sent, what speaks against it, and one commit with exactly that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from suture.checkpoint import weight_files
from suture.errors import ModelError, SutureError
from suture.export.public import card_licence
from suture.export.usage import THIS
from suture.exported import open_export

NAME = re.compile(r"(?!.*(--|\.\.))(?!.*\.git$)[A-Za-z0-9_]([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
LONGEST = 96  # characters that the hub takes
BELONGS = (  # `*` includes folders here
    *("*.safetensors", "*.gguf", "*.json", "*.jinja", "*.txt", "*.model", "*.png"),
    *("tokenizer*", "vocab.*", "modeling_suture.py", "README.md", "LICENSE*", "NOTICE*"),
)
PASSED_OVER = (".git", ".cache", "__pycache__", ".DS_Store")  # left behind by git, the hub's client, Python and macOS
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# what an earlier export may have left in a repository that libraries would still load
LOADED = ("*.safetensors", "*.safetensors.index.json", "*.gguf", "adapters/*", "modeling_*.py", "tokenizer*", "*.jinja")
TOLD = ("*.json", "*.md", "*.py")  # files that may tell of this machine
VOCABULARY = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json", "*.index.json")
ROOTS = {"home", "Users", "root", "tmp", "var", "mnt", "media", "opt", "srv", "private", "Volumes", "data", "scratch"}
ROOTS |= {"work", "workspace", "nfs", "gpfs", "content", "kaggle"}
POSIX = re.compile(r"""(?<![\w./~@<-])(?:~/|/(?!/))[^\s"'`<>,;:()\[\]{}|\\]+|file://[^\s"'`]+""")
WINDOWS = r"""(?<!\w)[A-Za-z]:{0}[\w. -]+{0}"""
ESCAPED, BARE = re.compile(WINDOWS.format(r"\\\\")), re.compile(WINDOWS.format(r"\\"))
SECRET = re.compile(r"\bhf_[A-Za-z0-9]{30,}")
FEW = 5  # things that one message lists
TIMEOUT = 30.0  # seconds for an answer of the hub


@dataclass(frozen=True)
class Push:
    """What is going to be sent: file → bytes, in order; `notes` are for the user to read."""

    folder: Path
    repository: str
    private: bool
    branch: str | None
    message: str
    files: dict[str, int]
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As plain data, for `--json`."""
        return {
            "repository": self.repository,
            "private": self.private,
            "branch": self.branch or "main",
            "message": self.message,
            "files": self.files,
            "bytes": sum(self.files.values()),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Pushed:
    """What came of it: the commit and its address, whether the repository is new, files of an older export removed."""

    url: str
    commit: str
    created: bool
    removed: tuple[str, ...]


def plan_push(
    folder: Path,
    repository: str,
    *,
    public: bool = False,
    branch: str | None = None,
    message: str | None = None,
) -> Push:
    """Check an export folder and list what would be sent; connects to nothing.

    Raises:
        ModelError: for a folder that is no export, one that is not verified, files that do not belong, folders of this
            machine or tokens in its texts.
        SutureError: for a repository's name that the hub does not take.
    """
    _check_name(repository)
    if folder.resolve().name.endswith(".failed"):
        raise ModelError(f"{folder} failed its verification (failed.json says why): export it again")
    export = open_export(folder)
    if not export.manifest.get("verified"):
        raise ModelError(f"{folder} was not verified: nobody has compared it with what was scored. Export it again")
    files = _files(folder)
    _check_weights(folder, export.kind, files)
    _check_texts(folder, files)
    notes = []
    if "README.md" not in files:
        notes.append("there is no model card (README.md)")
    elif card_licence(folder / "README.md") is None:
        notes.append(
            "README.md states no licence: add `license:` to its front matter if you know the parents' licences"
        )
    text = message or f"Upload {export.name}, exported by suture"
    return Push(folder, repository, not public, branch, text, files, tuple(notes))


def _check_name(repository: str) -> None:
    if not NAME.fullmatch(repository) or len(repository) > LONGEST:
        raise SutureError(
            f"{repository!r} is no name for a repository: write org/name (or your user name before the /), of letters, "
            f"digits, single dashes, dots and underscores, and {LONGEST} characters at most"
        )


def _files(folder: Path) -> dict[str, int]:
    """Path in the folder → bytes."""
    found: dict[str, int] = {}
    strange = []
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if not file.is_file() or any(part in PASSED_OVER for part in inside.parts):
            continue
        hidden = any(part.startswith(".") for part in inside.parts)
        if hidden or not any(fnmatch(inside.as_posix(), pattern) for pattern in BELONGS):
            strange.append(inside.as_posix())
        found[inside.as_posix()] = file.stat().st_size
    if strange:
        raise ModelError(f"{folder} holds files that are no part of an export: {_some(strange)}; remove them")
    return found


def _check_weights(folder: Path, kind: str, files: dict[str, int]) -> None:
    """Refuse missing and broken shards, and weights beside them that nothing loads."""
    if kind == "gguf":
        if not any(name.endswith(".gguf") for name in files):
            raise ModelError(f"{folder} is a GGUF export without a .gguf file: export it again")
        return
    known = {file.name for file in weight_files(folder)}
    loose = [name for name in files if "/" not in name and fnmatch(name, "*.safetensors") and name not in known]
    if loose:
        raise ModelError(f"{folder} holds weights that its index does not name: {_some(loose)}; remove them")


def _check_texts(folder: Path, files: Sequence[str] | dict[str, int]) -> None:
    """Refuse texts that tell where things are on this machine, or hold a token; file and line are named."""
    found = []
    for name in files:
        last = name.rpartition("/")[2]
        if not any(fnmatch(last, each) for each in TOLD) or any(fnmatch(last, each) for each in VOCABULARY):
            continue
        lines = (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            if SECRET.search(line):
                raise ModelError(
                    f"{name}, line {number} of {folder} holds what looks like a token of the hub: remove it"
                )
            found += [f"{name}, line {number}: {path}" for path in local_paths(line, escaped=name.endswith(".json"))]
    if found:
        raise ModelError(
            f"{folder} names places on this machine: {_some(found)}; edit these lines, or export it again with models "
            "and prompts named relative to the recipe"
        )


def local_paths(line: str, *, escaped: bool = False) -> list[str]:
    """Absolute paths in a line that look like a machine's own; `escaped`: backslashes are written twice, as in JSON."""
    found = [match[0].rstrip(".") for match in POSIX.finditer(line)]
    return [path for path in found if _is_local(path)] + (ESCAPED if escaped else BARE).findall(line)


def _is_local(path: str) -> bool:
    if path.startswith(("~", "file:")):
        return True
    parts = [part for part in path.split("/") if part]
    # an address such as /v1/completions has the form of a path, too
    return bool(parts) and ((len(parts) > 1 and parts[0] in ROOTS) or Path(path).exists())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def push(plan: Push) -> Pushed:
    """Send it, in one commit. Large files that an earlier try has sent are not sent again.

    In the model card `THIS_MODEL` becomes the repository's name.

    Raises:
        SutureError: without a token, for what the hub refuses, a repository of the other visibility, or one that holds
            weights which are no export.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise SutureError("HF_HUB_OFFLINE is set: unset it to push, or look with --dry-run")
    token = get_token()
    if not token:
        raise SutureError("there is no token for the hub: run `hf auth login`, or set HF_TOKEN")
    api = HfApi(token=token, library_name="suture")
    with _hub_errors(plan.repository, token):
        created, there = _open_repository(api, plan)
        removed = _outdated(plan, there)
        operations: list[Any] = [CommitOperationDelete(path) for path in removed]
        for name in plan.files:
            content: Any = plan.folder / name
            if name == "README.md":
                content = content.read_text(encoding="utf-8").replace(THIS, plan.repository).encode()
            operations.append(CommitOperationAdd(name, content))
        made = api.create_commit(plan.repository, operations, commit_message=plan.message, revision=plan.branch)
    return Pushed(f"{api.endpoint}/{plan.repository}", made.oid, created, tuple(removed))


def _open_repository(api: Any, plan: Push) -> tuple[bool, list[str]]:
    """Make the repository and branch, or check those that are there: (whether it is new, its files)."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        private = bool(api.model_info(plan.repository, timeout=TIMEOUT).private)
    except RepositoryNotFoundError:
        api.create_repo(plan.repository, private=plan.private)
        created = True
    else:
        created = False
        if private != plan.private:
            is_, asked = ("private", "public") if private else ("public", "private")
            advice = "leave out --public" if private else "use --public if that is meant"
            raise SutureError(
                f"{plan.repository} is there and {is_}, but {asked} was asked for: {advice}, change its "
                "visibility in its settings, or choose another name. Nothing was sent"
            )
    if plan.branch and not plan.branch.startswith("refs/"):
        api.create_branch(plan.repository, branch=plan.branch, exist_ok=True)
    return created, [] if created else api.list_repo_files(plan.repository, revision=plan.branch)


def _outdated(plan: Push, there: Sequence[str]) -> list[str]:
    """Files of an older export that libraries would load beside the new ones."""
    others = [name for name in there if name not in plan.files]
    weights = [name for name in there if any(fnmatch(name, each) for each in WEIGHTS)]
    if weights and "suture.json" not in there:
        raise SutureError(
            f"{plan.repository} holds weights that are no export of suture ({_some(weights)}): choose another name, or "
            "another --branch. Nothing was sent"
        )
    return [name for name in others if any(fnmatch(name, each) for each in LOADED)]


@contextmanager
def _hub_errors(repository: str, token: str) -> Iterator[None]:
    """The many kinds of errors of the hub's client as one, without the token."""
    try:
        yield
    except SutureError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        status = getattr(getattr(error, "response", None), "status_code", None)
        advice = "run the same command again: large files that have arrived are not sent twice"
        if status in (401, 403):
            advice = f"may your token write to {repository.partition('/')[0]}? `hf auth whoami` says whose it is"
        raise SutureError(f"{repository}: {' '.join(lines[:3]).replace(token, '***')}; {advice}") from error

"""What is kept of how a correction was made: `history.json` of its artifact, and `auto.json` where it was chosen."""

from __future__ import annotations

import json
from typing import Any

from suture.store import Artifact


def read_history(artifact: Artifact, domain: str) -> dict[str, Any]:
    """What a correction's history says of one domain; `auto` is there where it was chosen among several.

    `strength` is what it acts with (for all domains one, whatever `gate` says of one of them), None where nothing was
    held back to choose it.
    """
    history: dict[str, Any] = json.loads((artifact.path / "history.json").read_text())
    own: dict[str, Any] = history.pop("domains", {}).get(domain, {})
    chosen = artifact.path / "auto.json"
    auto = {"auto": json.loads(chosen.read_text())} if chosen.exists() else {}
    found = {**history, **own, **auto}
    gate = found["gate"] or {}
    return {"strength": gate.get("strength"), **found}


def patch_key(artifact: Artifact) -> str:
    """The key that states of a patched model are kept under: that of the patch which `auto` chose, if it did."""
    chosen = artifact.path / "auto.json"
    return str(json.loads(chosen.read_text())["chosen"]["key"]) if chosen.exists() else artifact.key

"""Names that recipes can use, and what is in the store: rows for `suture list`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from suture.errors import SutureError, did_you_mean

Row = dict[str, Any]


def inventory(what: str, store: Path | None) -> dict[str, list[Row]]:
    """Rows by list: the one that is named, or all but the artifacts.

    Raises:
        SutureError: for an unknown list, with the nearest.
    """
    listers: dict[str, Callable[[], list[Row]]] = {
        "methods": methods,
        "modules": modules,
        "losses": losses,
        "artifacts": lambda: artifacts(store),
    }
    if what and what not in listers:
        raise SutureError(f"unknown list {what!r}; {did_you_mean(what, listers)}")
    return {name: listers[name]() for name in ([what] if what else ["methods", "modules", "losses"])}


def methods() -> list[Row]:
    """Merge methods, all of mergekit's."""
    from suture.engine import merge_methods

    return [{"name": name, "method": full} for name, full in merge_methods()]


def modules() -> list[Row]:
    """Corrections: modules on the final states, and what acts inside the layers."""
    from suture.corrections import AUTO, LAYERED
    from suture.surgery import MODULES

    last = [{"name": name, "acts": "last layer", "what": _first_line(kind)} for name, kind in MODULES.items()]
    inside = [{"name": name, "acts": "all layers", "what": what} for name, what in LAYERED.items()]
    return [*last, *inside, {"name": AUTO, "acts": "either", "what": "the one with the least KL on held-back prompts"}]


def losses() -> list[Row]:
    """Losses."""
    from suture.losses import LOSSES

    return [{"name": name, "what": _first_line(function)} for name, function in LOSSES.items()]


def artifacts(store: Path | None) -> list[Row]:
    """Finished artifacts of a store."""
    from suture.store import Store

    return [
        {
            "kind": found.kind,
            "key": found.key,
            "made": found.spec["made"],
            "MB": round(sum(file.stat().st_size for file in found.path.rglob("*") if file.is_file()) / 1e6, 2),
            "path": str(found.path),
        }
        for found in Store(store).list()
    ]


def _first_line(thing: Any) -> str:
    return str(thing.__doc__ or "").strip().splitlines()[0]

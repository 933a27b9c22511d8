"""Every error that suture raises on purpose.

    SutureError
    ├── RecipeError      a field of the recipe is missing, misspelt or contradicts another
    ├── ModelError       a checkpoint or adapter cannot be found, read or trusted
    ├── FamilyError      the parents of a merge do not belong together
    ├── PromptError      prompts are missing, too few, or shared between calibration and evaluation
    ├── MergeError       a merge cannot be planned, or its result is not finite
    ├── SurgeryError     a surgery module or loss is unknown, or does not fit the states
    ├── AttachError      a model whose states suture cannot correct exactly
    ├── StoreError       an artifact is missing or was made by an incompatible version
    └── ResourceError    not enough disk or memory; says how much is needed

The message names the file, field, domain or tensor, and says what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SutureError(Exception):
    """Base of all errors in this package; its message is fit to be shown to a user."""


class RecipeError(SutureError):
    """A field of the recipe is missing, misspelt or contradicts another."""


class ModelError(SutureError):
    """A checkpoint or adapter cannot be found, read or trusted."""


class FamilyError(SutureError):
    """The parents of a merge do not belong together."""


class PromptError(SutureError):
    """Prompts are missing, too few, or shared between calibration and evaluation."""


class MergeError(SutureError):
    """A merge cannot be planned, or its result is not finite."""


class SurgeryError(SutureError):
    """A surgery module or loss is unknown, or does not fit the states it is given."""


class AttachError(SutureError):
    """A model whose hidden states suture cannot correct exactly."""


class StoreError(SutureError):
    """An artifact is missing or was made by an incompatible version."""


class ResourceError(SutureError):
    """Not enough disk or memory for what was asked."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"

"""suture: measure and correct merged language models.

merged, tokenizer = suture.load("path/to/merged")
target, _ = suture.load("base+adapter")
prompts = suture.tokenize(tokenizer, texts)
states, wanted = suture.capture(merged, prompts), suture.capture(target, prompts, entropy=True)
surgery = suture.calibrate(states, wanted).surgery
with suture.attach(merged, {"math": surgery}).domain("math"):
    merged.generate(...)
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from suture.attach import Attachment, attach, detach
    from suture.bias import BiasReport, measure_bias
    from suture.calibrate import Calibration, calibrate
    from suture.capture import capture, respond
    from suture.errors import SutureError
    from suture.evaluate.heldout import Score, score_heldout
    from suture.models import Head, load
    from suture.pipeline import Run
    from suture.prompts import tokenize
    from suture.recipe import Recipe, load_recipe
    from suture.states import HiddenCache, Tokens
    from suture.surgery import Surgery, load_surgery, save_surgery

__all__ = [
    "Attachment",
    "BiasReport",
    "Calibration",
    "Head",
    "HiddenCache",
    "Recipe",
    "Run",
    "Score",
    "Surgery",
    "SutureError",
    "Tokens",
    "attach",
    "calibrate",
    "capture",
    "detach",
    "load",
    "load_recipe",
    "load_surgery",
    "measure_bias",
    "respond",
    "save_surgery",
    "score_heldout",
    "tokenize",
]
__version__ = "0.1.0"

_HOMES = {
    "attach": "attach",
    "Attachment": "attach",
    "detach": "attach",
    "BiasReport": "bias",
    "measure_bias": "bias",
    "Calibration": "calibrate",
    "calibrate": "calibrate",
    "capture": "capture",
    "respond": "capture",
    "SutureError": "errors",
    "Score": "evaluate.heldout",
    "score_heldout": "evaluate.heldout",
    "Head": "models",
    "load": "models",
    "Run": "pipeline",
    "tokenize": "prompts",
    "Recipe": "recipe",
    "load_recipe": "recipe",
    "HiddenCache": "states",
    "Tokens": "states",
    "Surgery": "surgery",
    "load_surgery": "surgery",
    "save_surgery": "surgery",
}


class _Package(types.ModuleType):
    """Names are imported when first used: `import suture` and `suture --help` stay quick."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'suture' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"suture.{_HOMES[name]}"), name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # importing suture.capture would hide the function of that name behind the module
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

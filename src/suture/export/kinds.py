"""Which correction can go into which kind of export, and which one a recipe means."""

from __future__ import annotations

from collections.abc import Sequence

from suture.corrections import AUTO, LAYERED, Surgery
from suture.errors import RecipeError, SurgeryError, did_you_mean
from suture.inputs import FITTING
from suture.recipe import Recipe
from suture.surgery import MODULES, Affine

WEIGHTS = ("plain", "gguf")  # the correction is part of the weights: one domain, or one correction for all
CODE = ("hf", "vllm")  # modules of all domains beside the weights
KINDS = {
    "hf": "code beside the merged weights: any module on the final states, all domains, and a router",
    "plain": "the correction in the weights: stock classes, no overhead, one domain or one correction for all",
    "adapter": "the merged weights, and a PEFT LoRA for each domain",
    "vllm": "as hf, checked in vLLM with this package's plugin",
    "gguf": "as plain, converted for llama.cpp by its own converter",
}


def holds(kind: str, surgery: Surgery) -> bool:
    """Whether a kind of export can hold a correction."""
    if surgery.module == AUTO:
        among = surgery.among or FITTING[surgery.engine]
        # what is chosen cannot be fitted again without its constant
        return all(_holds(kind, name) and (kind in CODE or name != "affine") for name in among)
    return _holds(kind, surgery.module)


def _holds(kind: str, module: str) -> bool:
    if kind in CODE:
        return module in MODULES
    straight = module in LAYERED or (module in MODULES and issubclass(MODULES[module], Affine))
    return straight and not (kind == "adapter" and module == "heal")


def narrowed(recipe: Recipe, kind: str, label: str | None, domains: Sequence[str]) -> Recipe:
    """A recipe with the one correction and the domains that are exported.

    Args:
        label: of the correction; the recipe's last that the kind can hold by default.
        domains: all by default.

    Raises:
        RecipeError: for an unknown kind, correction or domain.
        SurgeryError: for a correction that the kind cannot hold, with the alternatives, or several domains where one
            checkpoint holds one.
    """
    if kind not in KINDS:
        raise RecipeError(f"--to: unknown kind {kind!r}; {did_you_mean(kind, KINDS)}")
    for name in domains:
        if name not in recipe.domains:
            raise RecipeError(f"unknown domain {name!r}; {did_you_mean(name, recipe.domains)}")
    known = {surgery.label: surgery for surgery in recipe.surgery}
    fitting = [name for name, surgery in known.items() if holds(kind, surgery)]
    if label is not None and label not in known:
        raise RecipeError(f"unknown surgery {label!r}; {did_you_mean(label, known)}")
    if label is not None and label not in fitting:
        raise SurgeryError(
            f"--to {kind} cannot hold {label}: {_why(kind, known[label])}; {_instead(known, kind, label)}"
        )
    if not fitting:
        raise SurgeryError(
            f"--to {kind} can hold none of {', '.join(known)}: {_why(kind, recipe.surgery[-1])}; "
            f"{_instead(known, kind, recipe.surgery[-1].label)}"
        )
    chosen = known[label] if label is not None else known[fitting[-1]]
    names = list(dict.fromkeys(domains)) or list(recipe.domains)
    if chosen.module == "heal":
        if len(names) < len(recipe.domains):
            raise RecipeError(f"{chosen.label} is one correction for all domains: leave --domain out")
    elif kind in WEIGHTS and len(names) > 1:
        raise RecipeError(
            f"--to {kind} holds one domain, or heal for all: name it with --domain ({', '.join(recipe.domains)})"
        )
    recipe.surgery = [chosen]
    recipe.domains = {name: domain for name, domain in recipe.domains.items() if name in names}
    return recipe


def _why(kind: str, surgery: Surgery) -> str:
    if kind in CODE:
        return f"{surgery.module} acts inside the layers, and code beside the weights corrects final states"
    if surgery.module == "heal":
        return "it is one correction for all domains, and not of low rank"
    if surgery.module == AUTO:
        return f"it may choose what is not linear (give it engine: {'adapter' if kind == 'adapter' else 'plain'})"
    return f"{surgery.module} is not linear in the state"


def _instead(known: dict[str, Surgery], kind: str, label: str) -> str:
    others = [name for name, surgery in known.items() if holds(kind, surgery)]
    kinds = [name for name in KINDS if name != kind and holds(name, known[label])]
    return " or ".join(
        [
            *([f"export it --to {' or '.join(kinds)}"] if kinds else []),
            f"take --surgery {' or '.join(others)}"
            if others
            else f"add module {'standard or darts' if kind in CODE else 'linear or deep'} to the recipe",
        ]
    )

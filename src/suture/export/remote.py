"""A remote-code checkpoint: the merged weights, modules of all domains beside them, and one file of code."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from suture.errors import AttachError, SurgeryError
from suture.export.shards import add_tensors, change_config
from suture.models import decoder_of
from suture.surgery import MODULES, Surgery

CODE = "modeling_suture.py"
FORMAT = 1
STOCK = "transformers.models."
DECODER = 'decoder_path = "model"'  # as the template has it
POSITIONS = ("SEEN", "CACHES", "token_positions", "_positions", "_seen", "_length", "_remember")


def write_remote(
    folder: Path, surgeries: Mapping[str, Surgery], model: Any, *, router: Any = None, default: str | None = None
) -> None:
    """Turn a plain checkpoint into one that corrects itself: a shard, a file of code and settings are added.

    Args:
        folder: a complete checkpoint of stock classes.
        surgeries: domain → module.
        model: an instance of its class; no weight of it is read.
        router: chooses a domain by a state, in the order of `surgeries`; without one there is no "auto".
        default: what acts when nothing is asked for: a domain, "auto" or nothing.

    Raises:
        SurgeryError: for an architecture that cannot be exported so, or settings that do not fit. Nothing is written.
    """
    names = class_names(model)
    _check(surgeries, model, router, default)
    modules = [describe(surgery) for surgery in surgeries.values()]
    settings = {
        "format": FORMAT,
        "domains": list(surgeries),
        "modules": modules,
        "router": router is not None,
        "base_model_type": model.config.model_type,
        "classes": names,
    }
    prefix = f"{names['decoder_path']}.suture"
    tensors: dict[str, Tensor] = {}
    for index, surgery in enumerate(surgeries.values()):
        for name, tensor in surgery.state_dict().items():
            tensors[f"{prefix}.corrections.{index}.{name}"] = _narrow(tensor)
    for name, tensor in router.state_dict().items() if router is not None else ():
        tensors[f"{prefix}.router.{name}"] = tensor
    text = remote_source(settings)
    add_tensors(folder, tensors)
    for file in folder.glob("*.py"):  # of a checkpoint that brought code and was read by stock classes
        file.unlink()
    (folder / CODE).write_text(text)

    def change(config: dict[str, Any]) -> None:
        config |= {**_entries(settings), "suture": settings, "suture_domain": default}

    change_config(folder, change)


def describe(surgery: Surgery) -> dict[str, Any]:
    """A module's settings as the checkpoint's config keeps them."""
    name = next(name for name, kind in MODULES.items() if type(surgery) is kind)
    kept = {"module": name, "hidden": surgery.hidden, "rank": surgery.rank, "t_max": surgery.t_max}
    return {**kept, "strength": float(surgery.strength), **{key: getattr(surgery, key) for key in surgery.own}}


def _entries(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's config says of its type and classes."""
    stem, names = CODE.removesuffix(".py"), settings["classes"]
    roles = {"AutoConfig": "config", "AutoModel": "base", "AutoModelForCausalLM": "causal"}
    return {
        "model_type": f"suture_{settings['base_model_type']}",
        "architectures": [f"Suture{names['causal']}"],
        "auto_map": {auto: f"{stem}.Suture{names[role]}" for auto, role in roles.items()},
    }


def is_own_code(folder: Path) -> bool:
    """Whether all code that a folder brings is, byte for byte, what this version of suture writes for its config."""
    try:
        config = json.loads((folder / "config.json").read_text())
        settings = config["suture"]
        if any(config.get(key) != value for key, value in _entries(settings).items()):
            return False
        for file in folder.glob("*.json"):  # tokenizers and processors can name code too, of other places even
            other = json.loads(file.read_text())
            if file.name != "config.json" and isinstance(other, dict) and "auto_map" in other:
                return False
        same: bool = (folder / CODE).read_bytes() == remote_source(settings).encode()
        # in folders too: `generate` runs custom_generate/generate.py
        return same and {file.relative_to(folder).as_posix() for file in folder.rglob("*.py")} == {CODE}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SurgeryError):
        return False


def class_names(model: Any) -> dict[str, str]:
    """Names of an architecture's classes, and where its decoder is.

    Raises:
        SurgeryError: for an architecture that cannot be exported with code.
    """
    kind = type(model).__name__
    try:
        path, decoder = decoder_of(model)
    except AttachError as error:
        raise SurgeryError(f"--to hf: {error}; export --to plain or adapter") from error
    base = model.base_model
    classes = {"config": model.config, "causal": model, "base": base, "decoder": decoder}
    for found in map(type, classes.values()):
        if not found.__module__.startswith(STOCK):
            raise SurgeryError(
                f"--to hf: {found.__name__} is not a class of transformers but code of the checkpoint's own, and one "
                "checkpoint has one file of code: export --to plain or adapter"
            )
    if type(decoder.config) is not type(model.config) or base is model:
        raise SurgeryError(
            f"--to hf: {kind} is more than a language model (its decoder has settings of its own): export --to plain "
            "or adapter"
        )
    names = {role: type(found).__name__ for role, found in classes.items()}
    inner = next(name for name, module in base.named_modules() if module is decoder)
    homes = {type(found).__module__ for role, found in classes.items() if role != "config"}
    if len(homes) > 1:
        raise SurgeryError(f"--to hf: the classes of {kind} lie in several modules: export --to plain or adapter")
    return {**names, "decoder_path": path, "inner_path": inner, "module": homes.pop().removeprefix(STOCK)}


def _check(surgeries: Mapping[str, Surgery], model: Any, router: Any, default: str | None) -> None:
    width = model.config.hidden_size
    for name, surgery in surgeries.items():
        if surgery.hidden != width:
            raise SurgeryError(f"the surgery of {name!r} is for states of width {surgery.hidden}, not {width}")
    if not surgeries:
        raise SurgeryError("--to hf needs a correction of one domain at least")
    if "auto" in surgeries:
        raise SurgeryError("a domain cannot be called 'auto' in an export: rename it in the recipe")
    known = [*surgeries, *(["auto"] if router is not None else [])]
    if default is not None and default not in known:
        raise SurgeryError(f"the default domain {default!r} is unknown; known: {', '.join(known)}")


def _narrow(tensor: Tensor) -> Tensor:
    """In bfloat16 where that loses nothing: modules are rounded to their stored dtype, and read in float32."""
    half = tensor.to(torch.bfloat16)
    return half if tensor.dtype == torch.float32 and torch.equal(half.float(), tensor) else tensor


def remote_source(settings: Mapping[str, Any]) -> str:
    """The text of `modeling_suture.py` for the `suture` entry of a checkpoint's config.

    It is put together from the modules of this package, and needs torch and transformers alone.

    Raises:
        SurgeryError: for a module that this version does not know.
    """
    from suture.export import modeling

    kinds = sorted({str(entry["module"]) for entry in settings["modules"]})
    if not set(kinds) <= set(MODULES):
        raise SurgeryError(f"unknown surgery modules: {', '.join(sorted(set(kinds) - set(MODULES)))}")
    classes = [each for kind in kinds for each in reversed(MODULES[kind].__mro__) if issubclass(each, Surgery)]
    homes = dict.fromkeys(each.__module__ for each in classes)  # what a module builds on comes before it
    sources: list[tuple[ModuleType, tuple[str, ...] | None]] = [(import_module(home), None) for home in homes]
    parts = {kind: MODULES[kind].__name__ for kind in kinds}
    if settings["router"]:
        sources.append((import_module("suture.router"), ("Router",)))
        parts["router"] = "Router"
    sources += [(import_module("suture.attach"), POSITIONS), (modeling, None)]
    imports: list[ast.stmt] = []
    bodies: list[str] = []
    for module, wanted in sources:
        found, body = _parts(module, wanted)
        imports += found
        bodies.append(body)
    body = "\n\n\n".join(bodies)
    listed = "".join(f'\n    "{name}": {kind},' for name, kind in parts.items())
    body = re.sub(r"^PARTS: .*$", f"PARTS = {{{listed}\n}}", body, flags=re.M)
    body = re.sub(r"  # type: ignore\[.*\]$", "", body, flags=re.M)
    text = f'"""{inspect.getdoc(modeling)}\n\nWritten by suture."""\n\n{_imports(imports, body)}\n\n{body}\n'
    return _renamed(text, settings)


def _parts(module: ModuleType, wanted: Iterable[str] | None) -> tuple[list[ast.stmt], str]:
    """A module's imports, and the text of what it defines: all of it, or the names that are wanted and their needs."""
    text = inspect.getsource(module)
    lines = text.splitlines()
    imports: list[ast.stmt] = []
    kept: list[tuple[bool, str]] = []
    chosen = _closed(ast.parse(text), set(wanted)) if wanted is not None else None
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif isinstance(node, ast.Expr):
            continue  # the docstring
        elif chosen is None or _names(node) & chosen:
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
            kept.append(
                (isinstance(node, (ast.ClassDef, ast.FunctionDef)), "\n".join(lines[first - 1 : node.end_lineno]))
            )
    out = ""
    for place, (large, piece) in enumerate(kept):
        out += "" if place == 0 else "\n\n\n" if large or kept[place - 1][0] else "\n"
        out += piece
    return imports, out


def _closed(tree: ast.Module, wanted: set[str]) -> set[str]:
    """Names, and those of the same module that their definitions use."""
    defined = {name: node for node in tree.body for name in _names(node)}
    found: set[str] = set()
    while wanted - found:
        name = min(wanted - found)
        found.add(name)
        used = {each.id for each in ast.walk(defined[name]) if isinstance(each, ast.Name)}
        wanted |= used & set(defined)
    return found


def _names(node: ast.stmt) -> set[str]:
    """What a statement defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {each.id for each in targets if isinstance(each, ast.Name)}


def _imports(nodes: Iterable[ast.stmt], body: str) -> str:
    """The imports that a text needs, each once; the package's own are gone."""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    plain: set[str] = set()
    named: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            plain |= {each.name for each in node.names if each.name in used}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("suture", "__future__")):
            named.setdefault(node.module, set()).update(each.name for each in node.names if each.name in used)
    rest = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(named.items()) if names]
    standard = [f"import {name}" for name in sorted(plain - {"torch"})]
    first = [line for line in rest if not line.startswith(("from torch", "from transformers"))]
    last = [line for line in rest if line not in first]
    blocks = ["from __future__ import annotations", "\n".join(standard + first), "\n".join(["import torch", *last])]
    return "\n\n".join(blocks) + "\n"


def _renamed(text: str, settings: Mapping[str, Any]) -> str:
    """The text for another architecture than Llama."""
    names = settings["classes"]
    base, decoder, causal, config = (names[role] for role in ("base", "decoder", "causal", "config"))
    for word in (*names.values(), settings["base_model_type"]):
        if not re.fullmatch(r"[A-Za-z0-9_.-]*", word):  # config.json may be anybody's: see `is_own_code`
            raise SurgeryError(f"{word!r} is no name of a class or module")
    start = text.index("class SutureLlamaForCausalLM")
    if base != decoder:  # a class between the decoder and the whole model, for AutoModel
        whole = text[start:]
        between = (
            whole[: whole.index("    def generate")].rstrip().replace("The whole model", "The model without a head")
        )
        between = between.replace(DECODER, f'decoder_path = "{names["inner_path"]}"')
        between = between.replace("LlamaForCausalLM", "LlamaBase")
        text = f"{text[:start]}{between}\n\n\n{whole}"
    text = text.replace(DECODER, f'decoder_path = "{names["decoder_path"]}"')
    text = text.replace("suture_llama", f"suture_{settings['base_model_type']}")
    imported = ", ".join(sorted({base, decoder, causal}))
    text = text.replace(
        "from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel",
        f"from transformers import {config}\nfrom {STOCK}{names['module']} import {imported}",
    )
    classes = {"LlamaForCausalLM": causal, "LlamaModel": decoder, "LlamaConfig": config, "LlamaBase": base}
    return re.sub("|".join(classes), lambda match: classes[match[0]], text)

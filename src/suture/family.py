"""Whether the parents of a merge belong together: vocabulary, rope, shapes. Every mismatch at once, before any work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from suture.checkpoint import Checkpoint, header, read_json, weight_files
from suture.errors import FamilyError, ModelError

# fields that make the same weights compute something else
BLOCKING = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "hidden_act",
    "tie_word_embeddings",
    "sliding_window",
)
WIDTH = "hidden_size"
SHOWN = 8


def check_family(parents: Mapping[str, Checkpoint], *, rows_may_differ: bool = False) -> list[str]:
    """Compare every parent with the first one.

    Args:
        parents: by the name that messages use.
        rows_may_differ: whether vocabularies of different size are dealt with later (mergekit's
            `tokenizer_source`, or a merged model beside a target with an added token).

    Returns:
        Notes on differences that can be worked with (for example `max_position_embeddings`).

    Raises:
        FamilyError: lists every field, tensor and token that differs, by parent.
    """
    names = list(parents)
    problems: list[str] = []
    notes: list[str] = []
    for name in names[1:]:
        first, other = parents[names[0]], parents[name]
        if first.base != other.base:
            problems += _field_problems(names[0], first, name, other)
            problems += _tensor_problems(names[0], first, name, other, rows_may_differ)
        # an adapter may bring its own tokenizer
        moved = moved_tokens(names[0], vocabulary(first), name, vocabulary(other))
        if rows_may_differ:
            notes += moved
        else:
            problems += moved
        notes += _added_tokens(names[0], first, name, other)
        problems += _adapter_problems(name, other)
        limits = [each.text_config.get("max_position_embeddings") for each in (first, other)]
        if limits[0] != limits[1]:
            notes.append(f"max_position_embeddings: {limits[0]} in {names[0]}, {limits[1]} in {name}")
    if names:
        problems = _adapter_problems(names[0], parents[names[0]]) + problems
    if problems:
        raise FamilyError("these models do not belong together:\n  " + "\n  ".join(problems))
    return notes


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope settings in one form: transformers 5 keeps `rope_parameters`, 4 had `rope_theta` and `rope_scaling`."""
    flat = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    flat.setdefault("rope_theta", config.get("rope_theta"))
    kind = flat.pop("type", None)
    flat.setdefault("rope_type", kind or "default")
    return flat


def _field_problems(first_name: str, first: Checkpoint, name: str, other: Checkpoint) -> list[str]:
    one, two = first.text_config, other.text_config
    ropes = [_rope(config) for config in (one, two)]
    # without rope_theta the architecture's default holds, or each kind of layer has its own: such compare with such
    comparable = len({rope["rope_theta"] is None for rope in ropes}) == 1
    for config, rope in zip((one, two), ropes, strict=True):
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            config.pop(key, None)
        if comparable:
            config["rope_parameters"] = rope
    return [
        f"config field {field}: {one.get(field)} in {first_name}, {two.get(field)} in {name}"
        for field in BLOCKING
        if field in one and field in two and one[field] != two[field]
    ]


def _tensor_problems(
    first_name: str, first: Checkpoint, name: str, other: Checkpoint, rows_may_differ: bool
) -> list[str]:
    one, two = first.tensors, other.tensors
    problems = []
    # a tied head may be stored or left out: both are the same model
    optional = {
        key
        for here, there, lacking in ((one, two, other), (two, one, first))
        for key in here.keys() - there.keys()
        if key.endswith("lm_head.weight") and lacking.text_config.get("tie_word_embeddings") is not False
    }
    if missing := sorted(one.keys() - two.keys() - optional):
        problems.append(f"{name} lacks {len(missing)} tensors of {first_name}: {_some(missing)}")
    if extra := sorted(two.keys() - one.keys() - optional):
        problems.append(f"{name} has {len(extra)} tensors that {first_name} lacks: {_some(extra)}")
    shapes = [key for key in sorted(one.keys() & two.keys()) if one[key][1] != two[key][1]]
    rows = [key for key in shapes if _per_token(one[key][1], first) and _per_token(two[key][1], other)]
    if rows and rows_may_differ:
        shapes = [key for key in shapes if key not in rows]
    elif rows:
        problems.append(
            f"{name} and {first_name} differ in vocabulary rows: set `tokenizer_source: base` or `union` in the merge"
        )
    if shapes:
        shown = [f"{key} {list(one[key][1])} and {list(two[key][1])}" for key in shapes]
        problems.append(f"{len(shapes)} tensors differ in shape between {first_name} and {name}: {_some(shown)}")
    return problems


def vocabulary(checkpoint: Checkpoint) -> dict[str, int] | None:
    """token → id from tokenizer.json with its added tokens; None where the folder has no such file.

    Raises:
        ModelError: for a file that is there but cannot be read.
    """
    file = (checkpoint.adapter or checkpoint.base) / "tokenizer.json"
    if not file.exists():
        file = checkpoint.base / "tokenizer.json"
    if not file.exists():
        return None
    loaded = read_json(file, "the tokenizer")
    try:
        vocab = loaded["model"].get("vocab") or {}
        tokens = (
            {str(token): int(index) for token, index in vocab.items()}
            if isinstance(vocab, dict)
            else {str(entry[0]): index for index, entry in enumerate(vocab)}  # unigram: [token, score] by rank
        )
        tokens.update({str(added["content"]): int(added["id"]) for added in loaded.get("added_tokens") or []})
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{file} is not a tokenizer that can be read: download it again") from error
    return tokens


def _per_token(shape: tuple[int, ...], checkpoint: Checkpoint) -> bool:
    return len(shape) > 0 and shape[0] == checkpoint.text_config.get("vocab_size")


def check_readers(merged: Checkpoint, tokens: Mapping[str, int] | None, targets: Mapping[str, Checkpoint]) -> list[str]:
    """Whether a merged model can be corrected towards each target: one width, and the same ids for the same tokens.

    Args:
        merged: the merged checkpoint, or the parent that lends a merge its config.
        tokens: token → id of the merged model; by default what `merged` has.
        targets: by domain.

    Returns:
        Notes on everything else in which they differ.

    Raises:
        FamilyError: lists every difference that would make states incomparable.
    """
    problems: list[str] = []
    notes: list[str] = []
    known = tokens if tokens is not None else vocabulary(merged)
    for domain, target in targets.items():
        name = f"the target of {domain}"
        fields = _field_problems("the merged model", merged, name, target)
        problems += [field for field in fields if f" {WIDTH}:" in field] + _adapter_problems(name, target)
        notes += [field for field in fields if f" {WIDTH}:" not in field]
        problems += moved_tokens("the merged model", known, name, vocabulary(target))
        if tokens is None and merged.base != target.base:
            notes += _added_tokens("the merged model", merged, name, target)
    if problems:
        raise FamilyError("states of these models cannot be compared:\n  " + "\n  ".join(problems))
    return notes


def moved_tokens(
    first_name: str, first: Mapping[str, int] | None, name: str, other: Mapping[str, int] | None
) -> list[str]:
    """The same token under another id: such models do not read the same text."""
    one, two = first or {}, other or {}
    moved = sorted(token for token in one.keys() & two.keys() if one[token] != two[token])
    if not moved:
        return []
    shown = [f"{token!r} is {one[token]} and {two[token]}" for token in moved]
    return [
        f"{len(moved)} tokens have other ids in {name} than in {first_name}: {_some(shown)}; "
        "give such a model a tokenizer with the same ids first (mergekit-tokensurgeon does that)"
    ]


def _added_tokens(first_name: str, first: Checkpoint, name: str, other: Checkpoint) -> list[str]:
    """Tokens that one vocabulary has more: compared on the rows that both share."""
    one, two = vocabulary(first), vocabulary(other)
    if one is None or two is None:
        return []
    return [
        f"{len(only)} tokens of {here} are unknown to {there} and left out of comparisons: "
        + _some(sorted(map(repr, only)))
        for here, there, only in (
            (first_name, name, one.keys() - two.keys()),
            (name, first_name, two.keys() - one.keys()),
        )
        if only
    ]


def _adapter_problems(name: str, checkpoint: Checkpoint) -> list[str]:
    """An adapter whose factors do not fit the base's weights, or belong to layers that the base does not have."""
    if checkpoint.adapter is None:
        return []
    problems = []
    tensors = checkpoint.tensors
    patterns = {_numberless(key) for key in tensors}
    absent: set[str] = set()
    for file in weight_files(checkpoint.adapter):
        for key, (_, shape) in header(file).items():
            module, lora, side = key.removeprefix("base_model.model.").rpartition(".lora_")
            weight = tensors.get(f"{module}.weight")
            # names that occur nowhere may be another spelling; the same name with another number is a missing layer
            if lora and weight is None and _numberless(f"{module}.weight") in patterns:
                absent.add(module)
            if not lora or weight is None or len(weight[1]) != 2 or len(shape) != 2:
                continue
            down = side.removeprefix("embedding_").startswith("A")  # A [r, in], B [out, r]
            size = shape[1] if down else shape[0]
            # weights are [out, in], an embedding's the other way round; fan_in_fan_out says nothing of which
            turned = side.startswith("embedding_")
            either = checkpoint.adapter_config.get("fan_in_fan_out")
            if size not in (weight[1] if either else [weight[1][down != turned]]):
                problems.append(f"adapter {name}: {key} {list(shape)} does not fit {module}.weight {list(weight[1])}")
    if absent:
        problems.append(
            f"adapter {name}: its base lacks {len(absent)} modules that it changes: {_some(sorted(absent))}"
        )
    return problems


def _numberless(key: str) -> str:
    return re.sub(r"\d+", "#", key)


def _some(items: list[str]) -> str:
    more = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {more} more" if more > 0 else "")

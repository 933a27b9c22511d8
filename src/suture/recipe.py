"""The experiment as one model: a YAML file in, every field checked, unknown keys refused with the nearest known one."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from suture.corrections import Strict, Surgery
from suture.errors import RecipeError, did_you_mean

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Prompts(Strict):
    """Where a domain's prompts come from: a file (`path`) or a data set on the hub (`dataset`)."""

    path: str | None = Field(
        None, description="A .jsonl, .json, .parquet or .txt file (text: one prompt a line), relative to the recipe."
    )
    dataset: str | None = Field(None, description="A data set id for the `datasets` library.")
    name: str | None = Field(None, description="The data set's configuration, for example `main`.")
    split: str = Field("train", description="The data set's split.")
    revision: str | None = Field(None, description="The data set's revision: a commit makes a run repeatable.")
    field: str | None = Field(
        None, description="The field that holds the prompt; `prompt` when neither field nor template is given."
    )
    template: str | None = Field(
        None, description="A text with {field} places, for example `Question: {question}\\nAnswer:`."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> Prompts:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("give either path or dataset")
        if self.field is not None and self.template is not None:
            raise ValueError("give either field or template, not both")
        if self.template is not None:
            template_fields(self.template)
        return self


class Domain(Strict):
    """One thing that the merged model should still do: its target, and prompts of that kind."""

    target: str = Field(
        description="The fine-tune for this domain: a checkpoint folder, `org/name[@revision]`, `base+adapter`, or an "
        "adapter alone."
    )
    prompts: Prompts = Field(
        description="Unlabelled prompts; the recipe takes calibration and held-out ones from them, never the same."
    )
    heldout: Prompts | None = Field(
        None, description="Held-out prompts from elsewhere; by default the rest of `prompts`."
    )
    chat_template: bool = Field(False, description="Wrap each prompt in the target's chat template.")
    system: str | None = Field(None, description="A system message for the chat template.")

    @model_validator(mode="after")
    def _system_is_read(self) -> Domain:
        if self.system is not None and not self.chat_template:
            raise ValueError("system is part of a chat template: set chat_template to true, or leave system out")
        return self


class Heldout(Strict):
    """The text that scores are measured on: what each target writes for prompts that nobody calibrated on."""

    samples: int = Field(30, ge=1, description="Held-out prompts a domain.")
    tokens: int = Field(64, ge=1, description="Tokens that the target writes for each, greedily.")


def default_surgery() -> list[Surgery]:
    """The paper's own, as published, and the repair inside the layers that goes past it."""
    published = Surgery(module="darts", loss="ewl1", calibrate_on="prompts", gate=False, name="darts")
    return [published, Surgery(module="deep"), Surgery(module="heal")]


class Recipe(Strict):
    """One merge, its domains, and the corrections to train and compare."""

    name: str | None = Field(
        None, description="Name of the run and its folder; the recipe's file or folder by default."
    )
    merge: dict[str, Any] | str | None = Field(
        None, description="A mergekit configuration, verbatim, or the path of one."
    )
    merged: str | None = Field(
        None, description="Instead of `merge`: a checkpoint that is merged already, from anything."
    )
    merge_seed: int = Field(0, ge=0, description="Seed of random merge methods (DARE, DELLA).")
    domains: Annotated[dict[str, Domain], Field(min_length=1)] = Field(
        description="By name; a list of items with `name` is accepted too."
    )
    surgery: Annotated[list[Surgery], Field(min_length=1)] = Field(
        default_factory=default_surgery, description="One correction or a list of them."
    )
    heldout: Heldout = Field(default_factory=Heldout, description="The text that scores are measured on.")
    guard: Prompts | None = Field(
        None,
        description="Text of no domain, each entry whole: half of it holds `heal` to what the merged model does there, "
        "and on the other half the perplexity of both is reported.",
    )
    response_tokens: int = Field(
        64,
        ge=1,
        description="Tokens that a target writes for each calibration prompt, where a surgery asks for responses.",
    )
    split_seed: int = Field(0, ge=0, description="Which prompts calibrate and which are held out.")
    max_length: int = Field(512, ge=2, description="Prompts are cut to this many tokens.")
    dtype: Dtype = Field("auto", description="Of forward passes: `auto` is bfloat16 on a GPU and float32 on a CPU.")
    device: str = Field("auto", description="`auto`, `cpu`, `cuda`, `cuda:1`, `mps`.")
    trust_remote_code: bool = Field(False, description="Run modelling code that comes with a checkpoint.")
    _folder: Path = PrivateAttr(default_factory=Path.cwd)

    @field_validator("domains", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {_name(name): item for name, item in value.items()}
        if not isinstance(value, list):
            return value
        named: dict[str, Any] = {}
        for index, item in enumerate(value):
            if not isinstance(item, dict) or "name" not in item:
                raise ValueError(f"item {index} of the list has no name")
            name = _name(item["name"])
            if name in named:
                raise ValueError(f"two domains are called {name!r}")
            named[name] = {key: entry for key, entry in item.items() if key != "name"}
        return named

    @field_validator("merge", mode="before")
    @classmethod
    def _mapping_or_path(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, (dict, str)):
            raise ValueError(f"should be a mapping, mergekit's configuration, or the path of one (got {_short(value)})")
        return value

    @field_validator("surgery", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if (self.merge is None) == (self.merged is None):
            raise ValueError("give either merge (a mergekit configuration) or merged (a checkpoint)")
        labels = [surgery.label for surgery in self.surgery]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"two surgeries are called {label!r}: give one of them a name")
            if label in ("merged", "target"):
                raise ValueError(f"a surgery cannot be called {label!r}")
        if self.guard is not None and "guard" in self.domains:
            raise ValueError("a domain cannot be called 'guard' beside guard text, whose scores have that name")
        for name in [*self.domains, *labels, *([self.name] if self.name else [])]:
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not fit for a file name: use letters, digits, dot, dash, underscore")
        return self

    @property
    def folder(self) -> Path:
        """Where relative paths in the recipe start."""
        return self._folder

    @property
    def samples(self) -> int:
        """Calibration prompts that the most demanding surgery wants."""
        return max(surgery.samples for surgery in self.surgery)

    def merge_config(self) -> tuple[dict[str, Any], Path]:
        """The mergekit configuration and the folder its relative paths start from.

        Raises:
            RecipeError: if `merge` names a file that cannot be read.
        """
        if isinstance(self.merge, str):
            path = self.folder / self.merge
            return _read_yaml(path), path.resolve().parent
        return dict(self.merge or {}), self.folder


def load_recipe(path: Path | str) -> Recipe:
    """Read a recipe.

    Raises:
        RecipeError: one line a fault, each with the field's full name.
    """
    file = Path(path)
    recipe = parse_recipe(_read_yaml(file), file.resolve().parent, source=str(path))
    if recipe.name is None:
        stem = file.resolve().parent.name if file.stem == "recipe" else file.stem
        recipe.name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "run"
    return recipe


def parse_recipe(data: Mapping[str, Any], folder: Path | None = None, source: str = "recipe") -> Recipe:
    """A recipe from plain data; relative paths start from `folder`.

    Raises:
        RecipeError: one line a fault, each with the field's full name.
    """
    if "merge_method" in data and "domains" not in data:
        raise RecipeError(
            f"{source} is a mergekit configuration, not a recipe: put it (or its path) under `merge:` in a recipe, and "
            "name the domains beside it"
        )
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{source}:\n  " + "\n  ".join(_explain(fault) for fault in error.errors())) from error
    if folder is not None:
        recipe._folder = folder
    return recipe


def template_fields(template: str) -> list[str]:
    """Names of the {field} places of a template, each once, in order.

    Raises:
        ValueError: for braces that do not pair, or a place without a name.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"the template {template!r} cannot be read ({error}): write {{{{ for a brace") from error
    if not all(names):
        raise ValueError(
            f"the template {template!r} has a place without a name: write {{field}}, or {{{{}}}} for braces"
        )
    return list(dict.fromkeys(names))


def _name(value: Any) -> str:
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ValueError(f"the name {value!r} is not text: put it in quotes")
    return str(value)


class _Loader(yaml.SafeLoader):
    """YAML in which a key that is written twice is an error: the plain loader drops the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.composer.ComposerError(None, None, f"{key.value!r} is written twice", key.start_mark)
                seen.add(key.value)
        return node


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        raise RecipeError(f"{path} is empty")
    if not isinstance(loaded, dict):
        raise RecipeError(f"{path} should hold a mapping of fields, not {type(loaded).__name__}")
    return loaded


def _explain(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"]) or "recipe"
    if fault["type"] == "extra_forbidden":
        *parents, word = fault["loc"]
        return f"{where}: unknown field; {did_you_mean(str(word), _fields_at(parents))}"
    if fault["type"] == "missing":
        return f"{where}: missing"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" + ("" if fault["type"] == "value_error" else f" (got {_short(fault.get('input'))})")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fields_at(parents: list[Any]) -> list[str]:
    """Field names of the part of the recipe that a location points into."""
    parts: dict[str, type[Strict]] = {
        "domains": Domain,
        "surgery": Surgery,
        "heldout": Heldout,
        "prompts": Prompts,
        "guard": Prompts,
    }
    place: type[Strict] = Recipe
    for depth, part in enumerate(parents):
        if depth == 1 and parents[0] == "domains":
            continue  # a domain's own name, which may be that of a field
        # a domain's `heldout` is a source of prompts, the recipe's is how much text
        place = Prompts if part == "heldout" and depth else parts.get(str(part), place)
    return [field.alias or name for name, field in place.model_fields.items()]

"""Write docs/cli.md and docs/recipe.md from the code they describe; with --check, only say which of them are stale.

Run it as `make docs`; `make check` runs it with --check.
"""

from __future__ import annotations

import argparse
import sys
import types
import typing
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.testing import CliRunner

from suture.cli import app
from suture.corrections import Surgery
from suture.recipe import Domain, Heldout, Prompts, Recipe

DOCS = Path(__file__).resolve().parent
EXAMPLE = DOCS.parent / "examples" / "smollm2" / "recipe.yaml"
WIDTH = 100
NOTICE = "<!-- Written by docs/generate.py. Change that script or the code, then run `make docs`. -->"
# in the order in which a reader meets them
PARTS: dict[str, type[BaseModel]] = {
    "Recipe": Recipe,
    "Domain": Domain,
    "Prompts": Prompts,
    "Surgery": Surgery,
    "Heldout": Heldout,
}
BOUNDS = {"ge": "{} or more", "gt": "above {}", "le": "{} or less", "lt": "below {}", "min_length": "at least {}"}
WORDS: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "`true` or `false`", Any: "anything"}

CLI_INTRODUCTION = """\
# Command line

There is one command for each stage, and `run` for all of them; `heal` and `study repair` carry out stages of their own.
Below is what `--help` says for each, without the frames that it has in a terminal. `suture --help` lists the commands.

Conventions:

- Results, tables and `--json` documents go to stdout. Progress bars, notes and errors go to stderr.
- A stage whose artifact is in the [store](store.md) is not carried out again.
- A failure prints `error: ` and a message that names the file, field, domain or tensor. With `--json` stdout then holds
  `{"error": {"type": ..., "message": ...}}`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | an error that the message explains; for `doctor`, something that suture needs is missing |
| 2 | the command line itself could not be read |
| 130 | stopped with Ctrl-C; finished stages are kept, and the same command goes on from there |
"""

RECIPE_INTRODUCTION = """\
# Recipe

A recipe is a YAML file that describes one experiment: what is merged, which jobs (domains) the merged model should
still do, and which corrections are trained and compared. `suture run RECIPE` carries all of it out. Every other command
that takes a recipe carries out one stage of it.

Only `domains` and one of `merge` and `merged` are required. The defaults of `surgery` are the paper's method (`darts`)
with the paper's settings and protocol, a repair of each domain (`deep`), and one for all domains (`heal`).

## Rules

- Unknown fields are errors. The faults of a file are reported together, a line each, with the full name of the field:

    ```text
    error: recipe.yaml:
      domains.code.prompts: missing
      domains.code.promts: unknown field; did you mean 'prompts'?
      surgery.0.steps: Input should be greater than or equal to 1 (got 0)
    ```

- Relative paths start from the folder of the recipe. If `merge` names a file, relative paths in that file start from
  the file's own folder.
- Names of domains, surgeries and runs are used as file names: a letter or digit, then letters, digits, dot, dash and
  underscore.
- Models, prompts, disk and memory are checked before any weight is loaded.

Short forms:

| written | means |
|---|---|
| `prompts: code.jsonl` | `prompts: {path: code.jsonl}` |
| `surgery: {module: darts}` | a list with this one item |
| `domains:` as a list whose items have a `name` | a mapping from these names to the items |

A model is written in one of four ways, in `merge`, `merged` and `target` alike:

| written | means |
|---|---|
| `path/to/folder` | a checkpoint on disk (safetensors) |
| `org/name` or `org/name@revision` | a checkpoint on the hub, or a local copy of one (see [store](store.md)) |
| `base+adapter` | a LoRA adapter on a base; either half may be a folder or a hub id |
| an adapter alone | its `adapter_config.json` names the base |

A relative path that does not exist from the recipe's folder is taken for a hub id. [Merge](merge.md) says what the
`merge` part may hold, [Surgery](surgery.md) what the modules and losses of the last layer are, [Repair](repair.md) what
acts inside the layers, and [Scores](scores.md) how prompts are split.

## Example

The file `examples/smollm2/recipe.yaml`:
"""


def main() -> None:
    """Write the pages, or with --check exit 1 if a page on disk differs from what would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    check = parser.parse_args().check
    pages = {DOCS / "cli.md": cli_page(), DOCS / "recipe.md": recipe_page()}
    if not check:
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
        return
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if stale:
        names = ", ".join(path.relative_to(DOCS.parent).as_posix() for path in stale)
        sys.exit(f"stale: {names}: run `make docs`")


def cli_page() -> str:
    """docs/cli.md: the help of the program and of each command."""
    parts = [NOTICE, "", CLI_INTRODUCTION, _help([])]
    for command in _commands(typer.main.get_group(app)):
        parts += [f"## suture {' '.join(command)}\n", _help(command)]
    return "\n".join(parts)


def _commands(group: Any) -> list[list[str]]:
    """Words of every command, those of groups (`study repair`) in place of the groups."""
    found = []
    for name, command in group.commands.items():
        below = _commands(command) if hasattr(command, "commands") else [[]]
        found += [[name, *words] for words in below]
    return found


def _help(command: list[str]) -> str:
    """One `--help` in a fenced block."""
    # rich frames depend on the terminal and on rich's version; the plain help has the same words
    app.rich_markup_mode = None
    result = CliRunner().invoke(
        app, [*command, "--help"], prog_name="suture", color=False, terminal_width=WIDTH, max_content_width=WIDTH
    )
    if result.exit_code:
        raise RuntimeError(f"suture {' '.join(command)} --help failed: {result.output}") from result.exception
    lines = [line.rstrip() for line in result.output.strip().splitlines()]
    return "\n".join(["```text", *lines, "```", ""])


def recipe_page() -> str:
    """docs/recipe.md: the rules, the example, and a table for each part."""
    parts = [NOTICE, "", RECIPE_INTRODUCTION, "```yaml", EXAMPLE.read_text(encoding="utf-8").rstrip(), "```", ""]
    for name, model in PARTS.items():
        parts += [f"## {name}\n", f"{' '.join((model.__doc__ or '').split())}\n", _table(model)]
    return "\n".join(parts)


def _table(model: type[BaseModel]) -> str:
    """The fields of one part as a Markdown table."""
    rows = ["| field | type | default | description |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        cells = (f"`{field.alias or name}`", _type(field), _default(field), " ".join((field.description or "").split()))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*rows, ""])


def _type(field: FieldInfo) -> str:
    """The type of a field in words, with its bounds."""
    bounds = [
        words.format(f"{getattr(rule, name):g}")
        for rule in field.metadata
        for name, words in BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return ", ".join([_words(field.annotation), *bounds])


def _words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(each) for each in arguments if each is not type(None))
    if origin is typing.Annotated:
        return _words(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin is dict:
        inner = "" if arguments[1] is Any else f" from names to {_words(arguments[1])}"
        return f"mapping{inner}"
    if origin is list:
        return f"list of {_words(arguments[0])}"
    if annotation in WORDS:
        return WORDS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    raise TypeError(f"docs/generate.py has no words for the type {annotation}")


def _default(field: FieldInfo) -> str:
    """The default of a field as a recipe would say it."""
    if field.is_required():
        return "required"
    default = field.default
    if default is PydanticUndefined:
        # a default with items of its own: those in use are named, and their fields are in a table below
        default = typing.cast(typing.Callable[[], Any], field.default_factory)()
        if isinstance(default, BaseModel):
            return ", ".join(f"`{name}: {value}`" for name, value in default.model_dump(by_alias=True).items())
        return ", ".join(f"`{item.label}`" for item in default)
    if default is None:
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    main()

"""Commands answer on stdout, explain on stderr, and start without heavy libraries."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import suture
from suture.cli import app
from suture.cli.app import told as _told
from suture.store import Store

COMMANDS = (
    "run",
    "merge",
    "capture",
    "bias",
    "calibrate",
    "heal",
    "export",
    "generate",
    "list",
    "doctor",
    "chat",
    "serve",
    "push",
)
GOOD = "merged: {merged}\ndomains:\n  math: {{target: {merged}, prompts: math.txt}}\n"


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def document(*arguments: str, code: int = 0) -> Any:
    result = call(*arguments)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture
def broken(tmp_path: Path) -> str:
    (tmp_path / "broken.yaml").write_text(GOOD.format(merged="org/merged") + "surgery: {stepz: 3}\n")
    return str(tmp_path / "broken.yaml")


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = call(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert result.stderr == ""


def test_the_help_names_every_command():
    result = call("--help")
    assert result.exit_code == 0
    assert all(f" {command} " in result.stdout for command in COMMANDS)
    assert sorted(each.name or each.callback.__name__ for each in app.registered_commands) == sorted(COMMANDS)


@pytest.mark.parametrize("arguments", [["runn"], ["run"], ["run", "r.yaml", "--jsn"], ["generate", "r.yaml"]])
def test_a_misused_command_exits_with_2(arguments):
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr


# Lists


def test_the_names_that_recipes_can_use():
    found = document("list", "--json")
    assert list(found) == ["methods", "modules", "losses"]
    methods = {row["name"] for row in found["methods"]}
    assert {"task_arithmetic", "linear", "ties", "dare_ties", "dare_linear"} <= methods
    acts = {row["name"]: row["acts"] for row in found["modules"]}
    assert acts["standard"] == acts["darts"] == "last layer"
    assert {name for name, where in acts.items() if where == "all layers"} == {"deep", "heal", "svd", "asvd", "distil"}
    assert acts["auto"] == "either"
    assert {"l1", "ewl1", "kl", "ce"} <= {row["name"] for row in found["losses"]}
    assert all(row["what"] for kind in ("modules", "losses") for row in found[kind])


def test_one_list_and_as_a_table():
    assert list(document("list", "losses", "--json")) == ["losses"]
    table = call("list", "losses")
    assert table.exit_code == 0
    assert "ewl1" in table.stdout


def test_an_unknown_list_is_told_with_the_nearest():
    result = call("list", "metods")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: unknown list 'metods'; did you mean 'methods'?\n"


def test_artifacts_in_the_store(tmp_path):
    assert document("list", "artifacts", "--json") == {"artifacts": []}
    assert call("list", "artifacts").stdout == "Artifacts: none\n"
    with Store(tmp_path).create("states", {"a": 1}) as folder:
        (folder / "data").write_bytes(b"x" * 2_000_000)
    (row,) = document("list", "artifacts", "--store", str(tmp_path), "--json")["artifacts"]
    assert (row["kind"], row["MB"], row["path"]) == ("states", 2.0, str(tmp_path / "states" / row["key"]))


# Errors


@pytest.mark.parametrize("command", ["run", "merge", "capture", "bias", "calibrate"])
def test_a_broken_recipe_is_explained_on_stderr(broken, command):
    result = call(command, broken, "--quiet")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == f"error: {broken}:\n  surgery.0.stepz: unknown field; did you mean 'steps'?\n"


def test_with_json_an_error_is_a_document_too(broken):
    result = call("run", broken, "--json", "--quiet")
    message = f"{broken}:\n  surgery.0.stepz: unknown field; did you mean 'steps'?"
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"error": {"type": "RecipeError", "message": message}}
    assert result.stderr == f"error: {message}\n"


@pytest.mark.parametrize("command", ["run", "generate"])
def test_a_path_that_is_no_recipe(tmp_path, command):
    more = ("--domain", "math", "--prompt", "x") if command == "generate" else ()
    error = document(command, str(tmp_path), *more, "--json", code=1)["error"]
    assert error["message"] == f"{tmp_path} is neither a recipe file nor the folder of a run (it has no run.json)"
    error = document(command, str(tmp_path / "no.yaml"), *more, "--json", code=1)["error"]
    assert error["message"] == f"{tmp_path / 'no.yaml'}: No such file or directory"


def test_a_missing_model_leaves_nothing_behind(tmp_path):
    (tmp_path / "recipe.yaml").write_text(GOOD.format(merged="./gone"))
    result = call("run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out"), "--json", "--quiet")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"error": {"type": "ModelError", "message": "merged: no such folder: ./gone"}}
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_unknown_modules_and_losses_are_told_before_any_model_is_looked_for(tmp_path):
    for field, value, message in (
        ("module", "dart", "surgery.0: unknown surgery module 'dart'; did you mean 'darts'?"),
        ("loss", "kll", "surgery.0: unknown loss 'kll'; did you mean 'kl'?"),
    ):
        text = GOOD.format(merged="./gone") + f"surgery: {{{field}: {value}}}\n"
        (tmp_path / "recipe.yaml").write_text(text)
        error = document("run", str(tmp_path / "recipe.yaml"), "--json", "--quiet", code=1)["error"]
        assert error == {"type": "SurgeryError", "message": message}


def test_stopping_says_that_nothing_is_lost(capsys):
    with pytest.raises(typer.Exit) as stopped, _told(as_json=True):
        raise KeyboardInterrupt
    assert stopped.value.exit_code == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "stopped; finished stages are kept, run the same command to go on\n"


# Environment


def test_doctor_is_one_document():
    checks = {row["what"]: row for row in document("doctor", "--json")["checks"]}
    assert checks["torch"] == {
        "what": "torch",
        "state": "ok",
        "found": importlib.metadata.version("torch"),
        "mend": "",
    }
    assert checks["python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert checks["hub"]["state"] == "note"
    assert checks["hub"]["mend"] == "unset HF_HUB_OFFLINE"
    assert {"device", "memory", "disk"} <= set(checks)
    assert all(set(row) == {"what", "state", "found", "mend"} for row in checks.values())
    assert {row["state"] for row in checks.values()} <= {"ok", "note"}


def test_doctor_exits_with_1_when_something_is_missing(monkeypatch):
    monkeypatch.setattr("suture.doctor.REQUIRED", ("torch", "no-such-package"))
    result = call("doctor", "--json")
    assert result.exit_code == 1
    (row,) = [row for row in json.loads(result.stdout)["checks"] if row["what"] == "no-such-package"]
    assert row == {
        "what": "no-such-package",
        "state": "missing",
        "found": "not installed",
        "mend": "pip install no-such-package",
    }


# The package


def test_public_names_are_sorted_and_there():
    assert suture.__all__ == sorted(suture.__all__)
    assert len(set(suture.__all__)) == len(suture.__all__)
    for name in suture.__all__:
        assert callable(getattr(suture, name)), name
    assert set(suture.__all__) <= set(dir(suture))
    assert suture.__version__ == importlib.metadata.version("suture")
    with pytest.raises(AttributeError, match="module 'suture' has no attribute 'captur'"):
        _ = suture.captur


def test_heavy_libraries_wait_until_they_are_needed():
    code = "import sys, suture.cli; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = set(python(code).split())
    assert "typer" in loaded
    assert not loaded & {"torch", "transformers", "mergekit", "peft", "datasets", "matplotlib", "pyarrow", "numpy"}


def test_functions_are_not_hidden_by_modules_of_the_same_name():
    code = (
        "import suture, suture.pipeline, suture.capture, suture.calibrate, suture.attach\n"
        "from suture.surgery import MODULES\n"
        "print(*(type(getattr(suture, name)).__name__ for name in ('capture', 'calibrate', 'attach')))\n"
        "print(suture.capture is sys.modules['suture.capture'].capture)"
    )
    assert python("import sys\n" + code) == "function function function\nTrue\n"
    before = python("import suture\ncapture = suture.capture\nimport suture.pipeline\nprint(suture.capture is capture)")
    assert before == "True\n"


@pytest.mark.parametrize("width", [80, 120])
def test_tables_keep_names_and_figures_whole_on_narrow_terminals(width):
    import io

    from rich.console import Console

    from suture.report.tables import HEADER, rich_table

    row = ("instruct", "standard-l1-responses", "0.0475", "17.2%", "93.0%", "1.472", "13.8%", "27.0%")
    out = io.StringIO()
    Console(file=out, width=width).print(rich_table("Scores", HEADER, [row]))
    line = next(line for line in out.getvalue().splitlines() if "0.0475" in line)
    assert line.split() == list(row)[: len(line.split())]
    assert line.split()[:3] == ["instruct", "standard-l1-responses", "0.0475"]


def test_places_where_nothing_can_be_written_are_told_before_any_work(tmp_path):
    (tmp_path / "file").write_text("x")
    for arguments in (["--out", "file"], ["--out", "file/run"], ["--store", "file"]):
        arguments[1] = str(tmp_path / arguments[1])
        found = CliRunner().invoke(app, ["run", str(tmp_path / "recipe.yaml"), *arguments])
        assert found.exit_code == 1
        assert f"{tmp_path}/file is a file where a folder should be written" in found.stderr


def test_a_mergekit_configuration_is_no_recipe(tmp_path):
    (tmp_path / "ties.yml").write_text("merge_method: ties\nmodels: []\n")
    found = CliRunner().invoke(app, ["run", str(tmp_path / "ties.yml"), "--json"])
    assert found.exit_code == 1
    assert (
        "is a mergekit configuration, not a recipe: put it (or its path) under `merge:`"
        in json.loads(found.stdout)["error"]["message"]
    )


def test_generate_refuses_what_contradicts_itself():
    found = CliRunner().invoke(app, ["generate", "x", "-d", "math", "-p", "x", "--uncorrected", "--surgery", "darts"])
    assert found.exit_code == 1
    assert "leave one of them out" in found.stderr

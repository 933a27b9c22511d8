"""A study: many corrections of one merge, each as if it had been run alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from relatives import open_run, recipe, write
from typer.testing import CliRunner

from suture.cli import app
from suture.corrections import Surgery
from suture.errors import RecipeError
from suture.evaluate.heldout import gap_closed
from suture.study import variants, widened


def test_variants_are_each_at_several_sizes_and_on_less_text() -> None:
    found = variants(50, 576, None)
    labels = [each.label for each in found]
    assert len(labels) == len(set(labels))
    assert {"darts", "standard-l1", "distil", "heal", "affine-576", "deep-0.75", "svd-0.75", "deep-on-12"} <= set(
        labels
    )
    assert {each.samples for each in found} == {50, 5, 12, 25}
    assert {each.module for each in variants(50, 576, ["deep", "heal"])} == {"deep", "heal"}
    # ranks above the width are left out
    assert [each.rank for each in variants(50, 8, ["affine"]) if "-on-" not in each.label] == [1, 4, 8]
    with pytest.raises(RecipeError, match="no correction of the study is among drats"):
        variants(50, 576, ["drats"])


def test_a_study_says_what_runs_say(family: Path, tmp_path: Path) -> None:
    path = write(family, "study", surgery={"module": "affine", "samples": 12}, response_tokens=6)
    arguments = ["study", "repair", str(path), "--module", "affine", "--module", "deep", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--store", str(tmp_path / "store"), "--json", "--quiet"])
    assert done.exit_code == 0, done.output
    points = json.loads(done.stdout)["points"]
    assert points == json.loads((tmp_path / "out" / "study.json").read_text())["points"]
    assert {point["domain"] for point in points} == {"math", "chat"}
    assert (tmp_path / "out" / "study.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "| math | deep-0.75 |" in (tmp_path / "out" / "study.md").read_text()
    few = {point["correction"]: point["tokens"] for point in points if point["domain"] == "math"}
    assert few["deep-on-6"] < few["deep-0.75"]
    # the same correction in a recipe of its own has the same figures
    alone = write(
        family, "alone", surgery={"module": "affine", "rank": 4, "samples": 12, "name": "a"}, response_tokens=6
    )
    scores = open_run(alone, tmp_path / "other").run(tmp_path / "run").scores
    for domain in recipe()["domains"]:
        (point,) = [each for each in points if (each["domain"], each["correction"]) == (domain, "affine-4")]
        assert point["closed"] == pytest.approx(gap_closed(scores, domain, "a"), abs=1e-6)
        assert point["parameters"] == 2 * 4 * 32 + 32


def test_a_widened_recipe_keeps_its_prompts(family: Path) -> None:
    from suture.recipe import load_recipe

    read = widened(load_recipe(write(family, "wide", surgery={"module": "affine", "samples": 7})), ["affine"])
    assert {each.samples for each in read.surgery} == {7, 4}
    assert max(each.rank or 0 for each in read.surgery) == 32  # H of the family
    assert all(isinstance(each, Surgery) for each in read.surgery)

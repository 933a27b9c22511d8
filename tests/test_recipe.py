"""A recipe's defaults are the paper's; whatever is wrong with one is said at once, with the field's full name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from suture.errors import RecipeError
from suture.recipe import Recipe, Surgery, load_recipe, parse_recipe, template_fields

MATH = {"target": "org/math", "prompts": "math.jsonl"}


def recipe(**changed: Any) -> Recipe:
    return parse_recipe({"merged": "org/merged", "domains": {"math": MATH}, **changed})


def fault(**changed: Any) -> str:
    with pytest.raises(RecipeError) as told:
        recipe(**changed)
    return str(told.value)


def prompts(**fields: Any) -> dict[str, Any]:
    return {"math": {"target": "org/math", "prompts": fields}}


# Defaults and forms


def test_the_numbers_are_the_papers():
    darts = Surgery()
    assert darts.model_dump() == {
        "name": None,
        "module": "darts",
        "loss": "ewl1",
        "rank": 16,
        "budget": None,
        "linears": None,
        "engine": "anything",
        "among": None,
        "gate": True,
        "t_max": 512,
        "waves": 8,
        "steps": 500,
        "lr": 0.001,
        "batch": 8,
        "seed": 0,
        "samples": 50,
        "calibrate_on": "responses",
        "smooth": 0.0,
        "shrink": 0.0,
        "start": "zero",
        "entropy_power": 1.0,
        "entropy_floor": 0.0,
        "early_stopping": False,
        "dtype": "bfloat16",
    }


def test_the_default_surgeries_are_the_papers_and_the_repairs():
    found = recipe()
    assert [(each.module, each.loss, each.label, each.calibrate_on, each.gate) for each in found.surgery] == [
        ("darts", "ewl1", "darts", "prompts", False),
        ("deep", None, "deep", "responses", True),
        ("heal", None, "heal", "responses", True),
    ]
    assert [(each.rank, each.budget, each.steps) for each in found.surgery] == [
        (16, None, 500),
        (None, 0.001, 500),
        (None, None, 500),
    ]
    assert found.samples == 50
    assert (found.heldout.samples, found.heldout.tokens) == (30, 64)
    assert (found.merge_seed, found.split_seed, found.max_length, found.dtype, found.device) == (
        0,
        0,
        512,
        "auto",
        "auto",
    )
    assert found.trust_remote_code is False


def test_domains_as_a_list_and_as_a_mapping_are_the_same():
    code = {"target": "org/code", "prompts": {"path": "code.txt"}, "chat_template": True, "system": "Be brief."}
    mapped = recipe(domains={"math": MATH, "code": code})
    listed = recipe(domains=[{"name": "math", **MATH}, {"name": "code", **code}])
    assert listed == mapped
    assert list(listed.domains) == ["math", "code"]
    assert listed.domains["code"].system == "Be brief."
    assert listed.domains["math"].prompts.path == "math.jsonl"


def test_a_number_may_be_a_domains_name():
    assert list(recipe(domains={2024: MATH}).domains) == ["2024"]
    assert list(recipe(domains=[{"name": 2024, **MATH}]).domains) == ["2024"]


def test_one_surgery_needs_no_list():
    one = recipe(surgery={"module": "standard", "loss": "l1", "T_max": 64, "samples": 20})
    assert one == recipe(surgery=[{"module": "standard", "loss": "l1", "t_max": 64, "samples": 20}])
    assert one.surgery[0].t_max == 64
    assert one.samples == 20


def test_the_most_demanding_surgery_says_how_many_prompts():
    assert recipe(surgery=[{"samples": 5}, {"name": "more", "samples": 70}]).samples == 70


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({}, "darts"),
        ({"rank": 4}, "darts"),
        ({"loss": "l1"}, "darts-l1"),
        ({"loss": "ewl1"}, "darts"),
        ({"module": "standard"}, "standard-l1"),
        ({"module": "standard", "loss": "ewl1"}, "standard-ewl1"),
        ({"module": "add"}, "add"),
        ({"module": "affine"}, "affine"),
        ({"module": "affine", "loss": "ewl2"}, "affine-ewl2"),
        ({"module": "deep", "rank": 4}, "deep"),
        ({"module": "auto"}, "auto"),
        ({"calibrate_on": "prompts"}, "darts-prompts"),
        ({"module": "heal", "calibrate_on": "prompts"}, "heal-prompts"),
        ({"loss": "l1", "calibrate_on": "prompts"}, "darts-l1-prompts"),
        ({"name": "mine", "module": "add", "calibrate_on": "prompts"}, "mine"),
    ],
)
def test_labels(settings, label):
    assert Surgery(**settings).label == label


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (16, None, "ewl1", 500)),
        ({"module": "standard"}, (16, None, "l1", 500)),
        ({"module": "affine", "rank": 3}, (3, None, "l2", 500)),
        ({"module": "deep"}, (None, 0.001, None, 500)),
        ({"module": "deep", "rank": 8}, (8, None, None, 500)),
        ({"module": "svd", "budget": 0.01}, (None, 0.01, None, 500)),
        ({"module": "heal"}, (None, None, None, 500)),
        ({"module": "heal", "budget": 0.01}, (None, 0.01, None, 500)),
        ({"module": "distil"}, (None, 0.001, None, 50)),
        ({"module": "distil", "steps": 7}, (None, 0.001, None, 7)),
        ({"module": "auto"}, (None, None, None, None)),
    ],
)
def test_what_is_left_open_is_each_modules_own(settings, expected):
    found = Surgery(**settings)
    assert (found.rank, found.budget, found.loss, found.steps) == expected
    again = parse_recipe(recipe(surgery=settings).model_dump(mode="json", by_alias=True, exclude_none=True))
    assert again.surgery == [found]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linears": ["o_proj"]}, "linears are for deep and heal"),
        ({"module": "svd", "linears": ["o_proj"]}, "linears are for deep and heal"),
        ({"budget": 0.01}, "budget: the size of darts follows from its rank: leave budget out"),
        ({"module": "deep", "loss": "l1"}, "loss: deep has none to choose: leave it out"),
        ({"module": "auto", "loss": "kl"}, "loss: auto has none to choose: leave it out"),
        ({"module": "deep", "rank": 4, "budget": 0.01}, "give either rank or budget"),
        ({"module": "heal", "rank": 4, "budget": 0.01}, "give either rank or budget"),
        (
            {"module": "deep", "early_stopping": True},
            "early_stopping, smooth, shrink and start are not for deep: leave them out",
        ),
        (
            {"module": "heal", "smooth": 1.0},
            "early_stopping, smooth, shrink and start are not for heal: leave them out",
        ),
        ({"module": "deep", "engine": "plain"}, "engine and among are for module: auto"),
        ({"among": ["deep"]}, "engine and among are for module: auto"),
        ({"module": "auto", "rank": 4}, "rank: auto chooses it; give a budget"),
        ({"module": "auto", "among": ["deep", "heal"]}, "among: auto and heal are no choices for one domain"),
        ({"module": "auto", "among": ["auto"]}, "among: auto and heal are no choices for one domain"),
        ({"module": "auto", "samples": 1}, "samples: auto chooses on prompts that are held back: give 2 or more"),
    ],
)
def test_settings_that_a_module_cannot_have_are_refused(settings, message):
    with pytest.raises(RecipeError, match=re.escape(f"surgery.0: {message}")):
        recipe(surgery=settings)


def test_a_dump_reads_back_as_the_same_recipe():
    code = {"target": "t", "prompts": {"dataset": "org/d", "template": "{q}"}, "heldout": "h.txt"}
    first = recipe(domains={"math": MATH, "code": code}, surgery=[{"T_max": 9}, {"name": "b"}])
    again = parse_recipe(first.model_dump(mode="json", by_alias=True, exclude_none=True))
    assert again == first


# Files


def test_a_file_is_named_after_itself_or_its_folder(tmp_path):
    text = "merged: org/merged\ndomains:\n  math: {target: org/math, prompts: math.jsonl}\nsurgery: {lr: 1e-3}\n"
    for file, name in (
        ("three-way.yaml", "three-way"),
        ("drei Väter.yml", "drei-V-ter"),
        ("demo/recipe.yaml", "demo"),
        ("_draft_.yaml", "draft"),
        ("é.yaml", "run"),
    ):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        found = load_recipe(path)
        assert found.name == name
        assert found.folder == path.parent
        assert found.surgery[0].lr == 0.001  # YAML 1.1 reads 1e-3 as a text
        parse_recipe(found.model_dump(exclude_none=True, by_alias=True))  # its own name is fit for a recipe
    path.write_text("name: given\n" + text)
    assert load_recipe(str(path)).name == "given"


def test_merge_may_name_a_file(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "linear.yaml").write_text("merge_method: linear\n")
    data = {"merge": "configs/linear.yaml", "domains": {"math": MATH}}
    assert parse_recipe(data, tmp_path).merge_config() == ({"merge_method": "linear"}, tmp_path / "configs")
    inline = parse_recipe({**data, "merge": {"merge_method": "ties"}}, tmp_path)
    assert inline.merge_config() == ({"merge_method": "ties"}, tmp_path)
    missing = parse_recipe({**data, "merge": "configs/tise.yaml"}, tmp_path)
    with pytest.raises(RecipeError, match=r"configs/tise\.yaml: No such file or directory"):
        missing.merge_config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- merged: a\n", "recipe.yaml should hold a mapping of fields, not list"),
        ("just words\n", "recipe.yaml should hold a mapping of fields, not str"),
        ("", "recipe.yaml is empty"),
        ("# only a comment\n", "recipe.yaml is empty"),
        ("merged: [a\n", "recipe.yaml is not valid YAML: .*line 2"),
        ("a: 1\n\tb: 2\n", "recipe.yaml is not valid YAML: .*line 2"),
        ("merged: a\ndomains: {}\nmerged: b\n", "recipe.yaml is not valid YAML: 'merged' is written twice .*line 3"),
        (
            "merged: a\ndomains:\n  math: {target: a, prompts: b}\n  math: {target: c, prompts: b}\n",
            "recipe.yaml is not valid YAML: 'math' is written twice .*line 4",
        ),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "recipe.yaml")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: No such file or directory"):
        load_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(RecipeError, match="Is a directory"):
        load_recipe(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(RecipeError, match=r"latin\.yaml is not valid YAML"):
        load_recipe(tmp_path / "latin.yaml")


def test_yaml_anchors_and_overrides_are_no_duplicates(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "merged: org/merged\n"
        "domains: {math: {target: org/math, prompts: math.jsonl}}\n"
        "surgery:\n"
        "  - &base {module: standard, loss: l1, steps: 5}\n"
        "  - &more {<<: *base, loss: ewl1, steps: 6}\n"
        "  - {<<: *more, loss: kl, steps: 7}\n"
    )
    found = load_recipe(tmp_path / "recipe.yaml")
    assert [(each.module, each.loss, each.steps) for each in found.surgery] == [
        ("standard", "l1", 5),
        ("standard", "ewl1", 6),
        ("standard", "kl", 7),
    ]


def test_a_files_faults_name_the_file(tmp_path):
    (tmp_path / "r.yaml").write_text("merged: a\ndomains: {math: {target: a, prompts: b, sytem: c}}\nmerg_seed: 1\n")
    with pytest.raises(RecipeError) as told:
        load_recipe(tmp_path / "r.yaml")
    first, *lines = str(told.value).splitlines()
    assert first == f"{tmp_path / 'r.yaml'}:"
    assert lines == [
        "  domains.math.sytem: unknown field; did you mean 'system'?",
        "  merg_seed: unknown field; did you mean 'merge_seed'?",
    ]


# Faults


@pytest.mark.parametrize(
    ("changed", "where", "nearest"),
    [
        ({"domans": {}}, "domans", "domains"),
        ({"max_lenght": 3}, "max_lenght", "max_length"),
        ({"heldout": {"token": 3}}, "heldout.token", "tokens"),
        ({"domains": {"math": {**MATH, "chat_templat": True}}}, "domains.math.chat_templat", "chat_template"),
        ({"domains": [{"name": "math", **MATH, "held_out": "x"}]}, "domains.math.held_out", "heldout"),
        ({"domains": {"math": {**MATH, "prompts": {"pth": "x"}}}}, "domains.math.prompts.pth", "path"),
        ({"domains": {"math": {**MATH, "heldout": {"filed": "x"}}}}, "domains.math.heldout.filed", "field"),
        ({"surgery": {"stepz": 3}}, "surgery.0.stepz", "steps"),
        ({"surgery": [{}, {"name": "b", "Tmax": 3}]}, "surgery.1.Tmax", "T_max"),
        # names of domains that are names of fields too
        ({"domains": {"heldout": {**MATH, "targt": 1}}}, "domains.heldout.targt", "target"),
        ({"domains": {"surgery": {**MATH, "sistem": 1}}}, "domains.surgery.sistem", "system"),
        ({"domains": {"prompts": {**MATH, "prompts": {"splitt": 1}}}}, "domains.prompts.prompts.splitt", "split"),
    ],
)
def test_an_unknown_field_is_told_with_the_nearest(changed, where, nearest):
    assert f"\n  {where}: unknown field; did you mean {nearest!r}?" in fault(**changed)


def test_a_field_like_no_other_is_told_with_all():
    assert "heldout.zzz: unknown field; known: samples, tokens" in fault(heldout={"zzz": 1})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"domains": {"math": {"prompts": "p"}}}, "domains.math.target: missing"),
        ({"domains": {"math": {"target": "t"}}}, "domains.math.prompts: missing"),
        ({"domains": {"math": None}}, "domains.math: Input should be a valid dictionary"),
        ({"domains": {}}, "domains: Dictionary should have at least 1 item"),
        ({"domains": []}, "domains: Dictionary should have at least 1 item"),
        ({"domains": "math"}, "domains: Input should be a valid dictionary (got 'math')"),
        ({"domains": ["math"]}, "domains: item 0 of the list has no name"),
        ({"domains": [{"name": "math", **MATH}, MATH]}, "domains: item 1 of the list has no name"),
        ({"domains": [{"name": "m", **MATH}, {"name": "m", **MATH}]}, "domains: two domains are called 'm'"),
        ({"domains": [{"name": "1", **MATH}, {"name": 1, **MATH}]}, "domains: two domains are called '1'"),
        ({"domains": [{"name": ["m"], **MATH}]}, "domains: the name ['m'] is not text: put it in quotes"),
        ({"domains": {True: MATH}}, "domains: the name True is not text: put it in quotes"),
        ({"domains": {"a/b": MATH}}, "'a/b' is not fit for a file name"),
        ({"domains": {"..": MATH}}, "'..' is not fit for a file name"),
        ({"domains": {"": MATH}}, "'' is not fit for a file name"),
        ({"name": "my run"}, "'my run' is not fit for a file name"),
        ({"surgery": {"name": "über"}}, "'über' is not fit for a file name"),
        ({"merged": None}, "give either merge (a mergekit configuration) or merged (a checkpoint)"),
        ({"merge": {"merge_method": "linear"}}, "give either merge (a mergekit configuration) or merged"),
        ({"merge": ["linear"]}, "merge: should be a mapping, mergekit's configuration, or the path of"),
        ({"surgery": []}, "surgery: List should have at least 1 item"),
        ({"surgery": "darts"}, "surgery.0: Input should be a valid dictionary"),
        ({"surgery": [{}, {"rank": 4}]}, "two surgeries are called 'darts': give one of them a name"),
        ({"surgery": [{"name": "a"}, {"name": "a"}]}, "two surgeries are called 'a': give one of them a name"),
        ({"surgery": {"name": "merged"}}, "a surgery cannot be called 'merged'"),
        ({"surgery": {"name": "target"}}, "a surgery cannot be called 'target'"),
        ({"surgery": {"T_max": 4, "t_max": 5}}, "surgery.0.t_max: unknown field; did you mean 'T_max'?"),
        ({"dtype": "fp16"}, "dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16' (got 'fp16')"),
        ({"surgery": {"dtype": "float16"}}, "surgery.0.dtype: Input should be 'bfloat16' or 'float32' (got 'float16')"),
        ({"domains": prompts()}, "domains.math.prompts: give either path or dataset"),
        ({"domains": prompts(path="a", dataset="b")}, "domains.math.prompts: give either path or dataset"),
        ({"domains": prompts(path="a", field="b", template="{b}")}, "give either field or template, not both"),
        ({"domains": prompts(path="a", template="Q: {question")}, "the template 'Q: {question' cannot be read"),
        ({"domains": prompts(path="a", template="Q: {} A:")}, "the template 'Q: {} A:' has a place without a name"),
        ({"domains": {"math": {**MATH, "system": "Be brief."}}}, "domains.math: system is part of a chat template"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(changed, message):
    assert message in fault(**changed)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rank", 0, "greater than or equal to 1 (got 0)"),
        ("rank", 1.5, "valid integer, got a number with a fractional part (got 1.5)"),
        ("T_max", 0, "greater than or equal to 1 (got 0)"),
        ("steps", -1, "greater than or equal to 1 (got -1)"),
        ("steps", "many", "valid integer, unable to parse string as an integer (got 'many')"),
        ("lr", 0, "greater than 0 (got 0)"),
        ("lr", float("inf"), "finite number (got inf)"),
        ("lr", float("nan"), "finite number (got nan)"),
        ("batch", 0, "greater than or equal to 1 (got 0)"),
        ("samples", 0, "greater than or equal to 1 (got 0)"),
        ("seed", -1, "greater than or equal to 0 (got -1)"),
    ],
)
def test_numbers_that_cannot_be(field, value, message):
    told = fault(surgery={field: value})
    assert f"\n  surgery.0.{field}: Input should be " in told
    assert message in told


@pytest.mark.parametrize("field", ["merge_seed", "split_seed", "max_length"])
def test_numbers_of_the_recipe_that_cannot_be(field):
    assert f"{field}: Input should be greater than or equal to" in fault(**{field: -1})


def test_all_faults_are_told_at_once():
    told = fault(surgery={"stepz": 1, "rank": 0}, heldout={"samples": 0}, domains={"math": {"prompts": "p"}})
    assert len(told.splitlines()) == 5


def test_long_values_are_cut():
    told = fault(max_length="x" * 1000)
    assert len(told) < 250
    assert "..." in told


def test_data_that_is_no_mapping():
    with pytest.raises(RecipeError, match=r"mine\.json:\n  recipe: Input should be a valid dictionary"):
        parse_recipe(["merged"], source="mine.json")  # type: ignore[arg-type]


def test_template_fields():
    assert template_fields("Q: {question}\nHint: {hint:>4}\nAgain: {question!r} {{literal}}") == ["question", "hint"]
    assert template_fields("nothing") == []


def test_relative_paths_start_where_the_recipe_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recipe().folder == Path(tmp_path)

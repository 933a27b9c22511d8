"""A router: domains by the last state of a prompt, none where it is not clear; fitted, measured and switched on."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from relatives import make_family, open_run, recipe, write
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from torch import Tensor, nn
from typer.testing import CliRunner

from suture.attach import attach, detach
from suture.cli import app
from suture.errors import RecipeError, SurgeryError
from suture.evaluate.heldout import gap_closed
from suture.pipeline import Run
from suture.router import Router, fit_router
from suture.routing import Switch, fit, measure, modules, prompt_ends, routable
from suture.states import HiddenCache, Tokens
from suture.surgery import Surgery, make_surgery

STRANGE = f"x1! {'1' * 8}, {'x' * 40}."
PLACES = torch.tensor([[3.0] * 16, [-3.0] * 16, [3.0, -3.0] * 8])


def clouds(count: int = 40, spread: float = 1.0, seed: int = 0, domains: int = 3) -> list[Tensor]:
    """States of domains: [count, 16] around places of their own, coordinates of very different spread."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.logspace(-1, 0.7, 16)
    return [place + spread * wide * torch.randn(count, 16, generator=generator) for place in PLACES[:domains]]


# The module


def test_a_new_router_abstains():
    assert Router(8, 3)(torch.randn(5, 8)).tolist() == [-1] * 5


@pytest.mark.parametrize("domains", [1, 2, 3])
@pytest.mark.parametrize("count", [3, 4, 5, 12, 50])
def test_new_prompts_find_their_domain_and_other_text_none(domains, count):
    router = fit_router(clouds(count, domains=domains))
    for index, states in enumerate(clouds(200, seed=1, domains=domains)):
        found = router(states)
        assert found.dtype == torch.int64
        assert set(found.tolist()) <= {index, -1}
        assert float((found == index).float().mean()) > 0.95
    far = torch.randn(100, 16, generator=torch.Generator().manual_seed(2)) + (12 if count >= 5 else 40)
    assert (router(far) == -1).all()


def test_it_abstains_between_domains():
    router = fit_router(clouds())
    between = (PLACES[0] + PLACES[1]) / 2
    near = PLACES[0] + 0.02 * (PLACES[1] - PLACES[0])
    assert router(torch.stack([between, near, PLACES[1]])).tolist() == [-1, 0, 1]


def test_what_it_computes():
    """Distances, margins and choices against loops over numbers."""
    router = fit_router(clouds(spread=3))
    states = torch.cat(clouds(30, 4, seed=5))
    kept = {name: tensor.tolist() for name, tensor in router.state_dict().items()}
    assert list(kept) == ["centres", "scale", "limits", "margin"]
    answers = []
    for row, (state, margin) in enumerate(zip(states.tolist(), router.margins(states).tolist(), strict=True)):
        distances = [
            sum(((h - m) * s) ** 2 for h, m, s in zip(state, centre, kept["scale"], strict=True)) / 16
            for centre in kept["centres"]
        ]
        assert router.distances(states)[row].tolist() == pytest.approx(distances, rel=1e-4)
        one, two = sorted(distances)[:2]
        assert margin == pytest.approx(math.log(two / one), abs=1e-4)
        best = distances.index(one)
        answers.append(best if one < kept["limits"][best] and math.log(two / one) > kept["margin"][0] else -1)
    assert router(states).tolist() == answers
    assert {-1, 0, 1, 2} == set(answers)


def test_domains_that_lie_in_each_other_are_left_uncorrected_where_it_is_a_toss():
    generator = torch.Generator().manual_seed(3)
    close = [torch.randn(60, 16, generator=generator) + shift for shift in (0.0, 0.3)]
    router = fit_router(close)
    states = torch.cat([torch.randn(400, 16, generator=generator) + shift for shift in (0.0, 0.3)])
    wrong = torch.tensor([1, 0]).repeat_interleave(400)
    found = router(states)
    with torch.no_grad():
        router.margin.zero_()
    always = router(states)
    assert int((found == wrong).sum()) < 0.6 * int((always == wrong).sum())
    assert float((found < 0).float().mean()) > float((always < 0).float().mean()) + 0.1


def test_storage_in_bfloat16_changes_no_number_and_half_precision_states_are_read():
    router = fit_router(clouds())
    for name, tensor in router.state_dict().items():
        assert torch.equal(tensor.bfloat16().float(), tensor), name
    states = torch.cat(clouds(30, seed=4))
    wanted = router(states.bfloat16().float())
    assert torch.equal(router.bfloat16()(states.bfloat16()), wanted)


def test_the_class_is_self_contained():
    """An export embeds its source: torch, nn and Tensor are all that it may need."""
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "Tensor": Tensor}
    exec(inspect.getsource(Router), scope)
    fitted, states = fit_router(clouds()), torch.cat(clouds(seed=6))
    twin = scope["Router"](16, 3)
    twin.load_state_dict(fitted.state_dict())
    assert torch.equal(twin(states), fitted(states))


def test_prompts_that_all_end_alike():
    same = [place.expand(5, 16) for place in PLACES]
    router = fit_router(same)
    assert router(PLACES).tolist() == [0, 1, 2]
    assert router(PLACES + 1e-5).tolist() == [0, 1, 2]
    assert router(torch.zeros(1, 16)).tolist() == [-1]
    assert router(torch.full((1, 16), float("nan"))).tolist() == [-1]


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([], "3 or more calibration prompts of each domain"),
        ([torch.zeros(5, 4), torch.zeros(2, 4)], "3 or more calibration prompts of each domain"),
        ([torch.zeros(5, 4), torch.zeros(5, 6)], "differ in width"),
    ],
)
def test_what_no_router_can_be_made_of(states, said):
    with pytest.raises(SurgeryError, match=said):
        fit_router(states)


# On a model


def test_the_ends_of_prompts():
    states = torch.arange(9.0)[:, None]
    tokens = Tokens.of([[5] * 4, [5] * 2, [5] * 3], [2, 2, 1])
    assert prompt_ends(HiddenCache(tokens, states))[:, 0].tolist() == [1, 5, 6]


class Parity(Router):
    """By the sign of a state's first number; none where the second is high."""

    def forward(self, states: Tensor) -> Tensor:
        return torch.where(states[:, 1] > 0.5, -1, (states[:, 0] > 0).long())


def strong(seed: int) -> Surgery:
    generator = torch.Generator().manual_seed(seed)
    module = make_surgery("darts", 32, rank=4, t_max=12)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return module.eval().requires_grad_(False)


def test_a_batch_whose_rows_are_routed_apart():
    """Padded, cached generation against each prompt alone under the module that the router names for it."""
    model = tiny_model()
    surgeries, router = [strong(0), strong(1)], Parity(32, 2)
    prompts = [[*range(5, 5 + length), last] for last in range(20, 40) for length in (2, 5)]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ends = torch.cat([model.model(torch.tensor([each])).last_hidden_state[:, -1] for each in prompts])
    wanted = router(ends).tolist()
    assert set(wanted) == {-1, 0, 1}
    switch = Switch(router, surgeries)
    with attach(model, {"auto": switch}).domain("auto"):
        for _ in range(2):  # the second call chooses anew
            together = model.generate(ids, attention_mask=mask, **options)[:, width:]
            assert switch.choices.tolist() == wanted
            switch.choices = -1 - switch.choices
    detach(model)
    attached = attach(model, {"0": surgeries[0], "1": surgeries[1]})
    for row, (prompt, index) in enumerate(zip(prompts, wanted, strict=True)):
        with attached.domain(None if index < 0 else str(index)):
            alone = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), **options
            )
        assert together[row].tolist() == alone[0, len(prompt) :].tolist()


# On a recipe


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(recipe, store) of a run with guard text, and a correction inside the layers beside those that can be routed."""
    folder = make_family(tmp_path_factory.mktemp("routed"))
    (folder / "guard.txt").write_text("\n".join(f"{a}{b}! {b * 8}, {a * 40}." for a in "xyzwv" for b in "12"))
    surgery = [*recipe()["surgery"], {"module": "svd", "rank": 2, "samples": 12, "gate": False}]
    path = write(folder, "routed", surgery=surgery, guard="guard.txt")
    place = tmp_path_factory.mktemp("store")
    job = open_run(path, place)
    job.capture()
    return path, place


@pytest.fixture
def job(routed: tuple[Path, Path]) -> Run:
    return open_run(*routed)


def test_a_recipes_router_is_kept(job: Run, routed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = fit(job)
    expected = fit_router([prompt_ends(job.states(member, "calibration")[0]) for member in job.members.values()])
    monkeypatch.setattr("suture.routing.fit_router", None)
    for router in (first, fit(open_run(*routed))):
        for name, tensor in expected.state_dict().items():
            assert torch.equal(router.state_dict()[name], tensor)


def turned(job: Run) -> Router:
    """Makes the store's router one that errs: it takes each domain's prompts for the other's, and never abstains."""
    router = fit(job)
    (folder,) = (job.store.root / "router").iterdir()
    before = load_file(folder / "router.safetensors")
    tensors = {**before, "centres": before["centres"].flip(0), "limits": torch.full_like(before["limits"], 1e6)}
    save_file({**tensors, "margin": torch.full((1,), -1.0)}, folder / "router.safetensors")
    router.load_state_dict(load_file(folder / "router.safetensors"))
    return router


def test_figures_of_a_router_that_is_right(job: Run, routed: tuple[Path, Path]) -> None:
    found = measure(job, "darts")
    row = found.row()
    assert row["accuracy"] == 1
    assert [each["misrouted"] for each in row["by_domain"].values()] == [0, 0]
    assert row["abstained"] == sum(each["abstained"] for each in row["by_domain"].values()) / 12
    assert [each["prefix"] for each in row["outside"]] == [None, 8, 16, 32]
    states = HiddenCache.load(job.store.get("states", job.patched_inputs("", job.guard[1])).path)
    choices = fit(job)(states.states[states.tokens.lengths.cumsum(0) - 1])
    assert row["outside"][0]["abstained"] == int((choices < 0).sum()) == round(5 * row["outside_abstained"])
    for name, member in job.members.items():
        scores = [each for each in job.score(member) if each.metric == "kl"]
        figures = row["by_domain"][name]
        assert figures["kl"]["merged"] == pytest.approx(next(s.value for s in scores if s.model == "merged"))
        assert figures["gap_closed"]["corrected"] == pytest.approx(gap_closed(scores, name, "darts"))
        if not figures["abstained"]:
            assert figures["kl"]["routed"] == figures["kl"]["corrected"]
    assert json.loads(json.dumps(row)) == row
    assert measure(open_run(*routed), "darts") == found  # from the store


def test_figures_of_a_router_that_errs(job: Run, tmp_path: Path, routed: tuple[Path, Path]) -> None:
    """What a wrong correction costs, against scores of the states that it gives."""
    import shutil

    shutil.copytree(routed[1], tmp_path / "copy")
    job = open_run(routed[0], tmp_path / "copy")
    shutil.rmtree(job.store.root / "routing", ignore_errors=True)
    router = turned(job)
    found = measure(job, "darts")
    assert [(each.right, each.abstained, each.misrouted) for each in found.domains] == [(0, 0, 6), (0, 0, 6)]
    made = modules(job, job.surgery("darts"))
    for name, other in (("math", "chat"), ("chat", "math")):
        merged, target = job.states(job.members[name], "heldout")
        rows, _ = target.scored()
        wrong = made[other](merged.states[rows], merged.tokens.positions[rows])
        reference = torch.log_softmax(job.head(job.members[name].fingerprint)(target.states[rows]), -1)
        logits = torch.log_softmax(job.merged_head(wrong), -1)
        kl = float((reference.exp() * (reference - logits)).sum(-1).mean())
        figures = next(each for each in found.domains if each.domain == name)
        assert figures.kl["routed"] == pytest.approx(kl, rel=1e-3)
        assert figures.kl["routed"] != pytest.approx(figures.kl["corrected"], rel=1e-3)
    whole = found.outside[0]
    assert (whole.prefix, whole.abstained) == (None, 0)
    cache = HiddenCache.load(job.store.get("states", job.patched_inputs("", job.guard[1])).path)
    nats, count = 0.0, 0
    for states, ids in zip(cache.states.split(cache.tokens.lengths.tolist()), cache.tokens.sequences, strict=True):
        module = list(made.values())[int(router(states[-1:]))]
        logits = torch.log_softmax(job.merged_head(module(states, torch.arange(len(states)))), -1)
        nats -= float(logits[:-1].gather(1, ids[1:, None]).sum())
        count += len(ids) - 1
    assert whole.perplexity["routed"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert whole.perplexity["routed"] != whole.perplexity["merged"]


def test_inside_the_layers_only_the_choice_is_measured(job: Run) -> None:
    row = measure(job, "svd").row()
    assert row["accuracy"] == 1
    assert [each["kl"] for each in row["by_domain"].values()] == [None, None]
    assert [each["perplexity"] for each in row["outside"]] == [None] * 4


def test_what_can_be_routed(job: Run) -> None:
    assert routable(job, None).label == "darts"
    assert routable(job, "standard-l1").label == "standard-l1"
    with pytest.raises(RecipeError, match=r"svd acts inside the layers.* --surgery standard-l1, darts"):
        routable(job, "svd")
    with pytest.raises(RecipeError, match="svd of domain math acts inside the layers"):
        modules(job, job.surgery("svd"))


# In the terminal


def generate(routed: tuple[Path, Path], domain: str, prompt: str, *more: str, code: int = 0) -> Any:
    arguments = ["-d", domain, "-p", prompt, "--max-new-tokens", "12", "--store", str(routed[1] / "store"), *more]
    found = CliRunner().invoke(app, ["generate", str(routed[0]), *arguments, "--json"])
    assert found.exit_code == code, found.output
    return json.loads(found.stdout)


def test_generate_lets_the_router_choose(routed: tuple[Path, Path]) -> None:
    known = ["--surgery", "darts"]
    for domain, prompt, form in (
        ("math", "Q ivy bay ivy A", []),
        ("math", "Q ivy bay ivy A", ["--surgery", "darts"]),
        ("chat", "oak-pea", ["--chat"]),
    ):
        answer = generate(routed, "auto", prompt, *form)
        assert (answer["domain"], answer["routed"], answer["surgery"]) == ("auto", domain, "darts")
        raw = [] if "--chat" in form else ["--raw"]
        assert answer["text"] == generate(routed, domain, prompt, *known, *raw)["text"]
        if domain == "math":
            assert answer["text"] != generate(routed, domain, prompt, "--uncorrected", *raw)["text"]
    answer = generate(routed, "auto", STRANGE)
    assert answer["routed"] is None
    assert answer["text"] == generate(routed, "math", STRANGE, "--uncorrected", "--raw")["text"]


def test_generate_says_whose_correction_acted(routed: tuple[Path, Path]) -> None:
    for prompt, said in (
        ("Q ivy bay ivy A", "routed: math, darts"),
        (STRANGE, "routed: abstained, nothing was corrected"),
    ):
        arguments = ["-d", "auto", "-p", prompt, "--max-new-tokens", "2", "--store", str(routed[1] / "store")]
        found = CliRunner().invoke(app, ["generate", str(routed[0]), *arguments])
        assert found.exit_code == 0, found.output
        assert said in found.stderr
        assert "routed" not in found.stdout


@pytest.mark.parametrize(
    ("domain", "more", "said"),
    [
        ("auto", ["--uncorrected"], "-d auto chooses a correction, --uncorrected asks for none"),
        ("auto", ["--raw", "--chat"], "--raw leaves the prompt as it is"),
        ("math", ["--chat"], "--chat is for -d auto"),
        ("auto", ["--surgery", "svd"], "svd acts inside the layers"),
    ],
)
def test_generate_refuses_what_contradicts_a_router(routed, domain, more, said):
    assert said in generate(routed, domain, "x", *more, code=1)["error"]["message"]

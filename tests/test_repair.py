"""Repair inside the layers against least squares, SVDs, PEFT and hooks; and what it does to small models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_layers import READERS, TOKENS, WRITERS, granite, routed, seen_by_hooks, untouched
from tiny import ARCHITECTURES, VOCABULARY, nearby, tiny_model
from torch import Tensor

from suture.capture import capture
from suture.errors import StoreError, SurgeryError
from suture.gate import Gate, choose_strength, divergence, held_back, joint_strength
from suture.layers import Layers
from suture.models import Head
from suture.repair.distil import distil
from suture.repair.fit import Lesson, repair
from suture.repair.normal import EVERY, RIDGES, Chooser, Fit, Normal
from suture.repair.patch import Change, Folding, Patch, patched
from suture.repair.residuals import Residuals, write_residuals
from suture.repair.svd import svd_patch
from suture.states import HiddenCache, Tokens
from suture.wiring import shape_of

IN, OUT, N = 7, 5, 60


# --- sums and what is solved from them


def data(seed: int = 0, noise: float = 0.3, tokens: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """a [n, in], y [n, out] from one fixed map and noise, and which tokens are usual: two are large and are not."""
    generator = torch.Generator().manual_seed(1000 + seed)
    fixed = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(9))
    a = torch.randn(tokens, IN, generator=generator) * torch.tensor([3.0, 2, 1, 1, 1, 0.5, 0.2])
    y = a @ fixed.T + noise * torch.randn(tokens, OUT, generator=generator)
    usual = torch.ones(tokens, dtype=torch.bool)
    usual[[3, 11]] = False
    a[~usual] *= 20
    y[~usual] = 100 * torch.randn(2, OUT, generator=generator)
    return a, y, usual


def penalty(a: Tensor, usual: Tensor, ridge: float) -> float:
    return float(ridge * (a[usual].double() ** 2).sum() / a.shape[1])


def least_squares(a: Tensor, y: Tensor, usual: Tensor, ridge: float) -> Tensor:
    """[in, out] by numpy, on rows augmented by sqrt(k) I; unusual tokens have y = 0."""
    one = torch.cat([a.double(), penalty(a, usual, ridge) ** 0.5 * torch.eye(a.shape[1], dtype=torch.float64)])
    two = torch.cat([y.double() * usual[:, None], torch.zeros(a.shape[1], y.shape[1], dtype=torch.float64)])
    return torch.from_numpy(np.linalg.lstsq(one.numpy(), two.numpy(), rcond=None)[0])


def share(m: Tensor, a: Tensor, y: Tensor, usual: Tensor) -> float:
    """Share of y that a map [in, out] leaves, summed token by token."""
    wanted = y.double() * usual[:, None]
    return float(((wanted - a.double() @ m) ** 2).sum() / (wanted**2).sum())


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 3.0])
def test_full_rank_is_ridge_regression(ridge: float) -> None:
    fit = Fit(Normal.of(*data()), ridge)
    torch.testing.assert_close(fit.full, least_squares(*data(), ridge), atol=1e-4, rtol=1e-4)
    down, up = fit.factors(OUT)
    assert (down.shape, up.shape) == ((OUT, IN), (OUT, OUT))
    torch.testing.assert_close((up @ down).T, fit.full)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_reduced_rank_is_the_truncation_in_the_metric_and_nothing_near_is_better(rank: int) -> None:
    a, y, usual = data(1)
    ridge = 0.5
    down, up = Fit(Normal.of(a, y, usual), ridge).factors(rank)
    found = (up @ down).T
    k = penalty(a, usual, ridge)
    metric = a.double().T @ a.double() + k * torch.eye(IN, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(metric)
    inverse_root = vectors @ torch.diag(values**-0.5) @ vectors.T  # (G + k I)^-1/2
    u, s, vh = torch.linalg.svd(inverse_root @ (a.double().T @ (y.double() * usual[:, None])), full_matrices=False)
    torch.testing.assert_close(found, inverse_root @ (u[:, :rank] * s[:rank]) @ vh[:rank], atol=1e-5, rtol=1e-5)

    def objective(one: Tensor, two: Tensor) -> float:
        m = (one @ two).T
        return float(((y.double() * usual[:, None] - a.double() @ m) ** 2).sum() + k * (m**2).sum())

    best = objective(up, down)
    generator = torch.Generator().manual_seed(rank)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(50):
            one = up + size * torch.randn(up.shape, generator=generator, dtype=torch.float64)
            two = down + size * torch.randn(down.shape, generator=generator, dtype=torch.float64)
            # sums are of float32 products
            assert objective(one, two) > best * (1 - 1e-6)


def test_errors_from_sums_are_those_over_other_tokens() -> None:
    fit = Fit(Normal.of(*data(2, noise=2.0)), 0.1)
    other = data(3, noise=2.0)
    errors = fit.errors(Normal.of(*other), OUT)
    expected = [share((up @ down).T, *other) for down, up in (fit.factors(rank) for rank in range(OUT + 1))]
    torch.testing.assert_close(errors, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)
    assert errors[0] == 1
    assert fit.error(Normal.of(*other)) == pytest.approx(expected[-1], rel=1e-4)
    assert len(fit.errors(Normal.of(*other), 2)) == 3


@pytest.mark.parametrize(("noise", "tokens"), [(0.01, 60), (3.0, 25), (30.0, 15)])
def test_the_ridge_is_that_of_least_error_on_held_back_tokens(noise: float, tokens: int) -> None:
    fitted, held = data(4, noise, tokens), [data(5, noise, tokens), data(6, noise, tokens)]
    lefts = {ridge: sum(share(least_squares(*fitted, ridge), *each) for each in held) / 2 for ridge in RIDGES}
    fit, rank, left = Chooser().choose("x", Normal.of(*fitted), [Normal.of(*each) for each in held], None)
    assert fit.ridge == min(lefts, key=lambda ridge: lefts[ridge])
    assert rank is None
    assert left == pytest.approx(min(lefts.values()), rel=1e-4)


def usual_ones(seed: int, noise: float, tokens: int) -> Normal:
    a, y, usual = data(seed, noise, tokens)
    return Normal.of(a[usual], y[usual], usual[usual])


def test_noise_is_shrunk_and_a_clean_relation_is_not() -> None:
    assert Chooser().choose("x", usual_ones(4, 0.01, 60), [usual_ones(5, 0.01, 60)], None)[0].ridge == min(RIDGES)
    assert Chooser().choose("x", usual_ones(4, 30.0, 15), [usual_ones(5, 30.0, 15)], None)[0].ridge == max(RIDGES)


def test_the_rank_is_as_low_as_held_back_tokens_allow() -> None:
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(1, OUT, generator=generator)

    def rank_one() -> Normal:
        a = torch.randn(40, IN, generator=generator)
        y = a[:, :1] @ direction + 0.3 * torch.randn(40, OUT, generator=generator)
        return Normal.of(a, y, torch.ones(40, dtype=torch.bool))

    fitted, held = rank_one(), rank_one()
    fit, rank, left = Chooser().choose("x", fitted, [held], 4)
    assert rank == 1
    assert left == pytest.approx(float(fit.errors(held, 4)[1]))
    assert Chooser().choose("x", fitted, [held], 0)[1:] == (0, 1.0)
    fit, rank, left = Chooser().choose("x", fitted, [], 4)
    assert (fit.ridge, rank) == (1.0, 4)
    assert left != left


def test_ridges_are_tried_again_at_each_fourth_linear_of_a_kind() -> None:
    clean, noisy = ([usual_ones(seed, noise, 20) for seed in (4, 5)] for noise in (0.01, 30.0))
    chooser = Chooser()
    first = chooser.choose("o_proj", clean[0], [clean[1]], None)[0].ridge
    best = Chooser().choose("o_proj", noisy[0], [noisy[1]], None)[0].ridge
    assert first != best
    chosen = [chooser.choose("o_proj", noisy[0], [noisy[1]], None)[0].ridge for _ in range(EVERY)]
    assert chosen == [first] * (EVERY - 1) + [best]
    # another kind starts anew
    assert chooser.choose("down_proj", noisy[0], [noisy[1]], None)[0].ridge == best


def test_sums_of_a_known_difference_are_those_of_its_outputs() -> None:
    a, _, _ = data()
    difference = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    found = Normal.between(Normal.gram_of(a), difference)
    expected = Normal.of(a, a @ difference.T, torch.ones(len(a), dtype=torch.bool))
    for one, two in zip(vars(found).values(), vars(expected).values(), strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(two), rtol=1e-4, atol=1e-2)


def test_nothing_to_learn_is_rank_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(30, IN + OUT, generator=generator) for _ in range(2)]
    fitted, held = (Normal.of(each[:, :IN], each[:, IN:], torch.ones(30, dtype=torch.bool)) for each in noise)
    _, rank, left = Chooser().choose("x", fitted, [held], OUT)
    assert (rank, left) == (0, 1.0)


def test_unusual_tokens_stay_nearly_as_they_are() -> None:
    a, y, usual = data()
    with_them = Fit(Normal.of(a, y, usual), 0.1).full
    without = Fit(Normal.of(a[usual], y[usual], usual[usual]), 0.1).full
    moved, would_be = ((a[~usual].double() @ m).norm(dim=-1) for m in (with_them, without))
    assert bool((moved < 0.1 * would_be).all())
    # what they are is not asked: another y of theirs changes nothing
    y[~usual] *= -7
    torch.testing.assert_close(Fit(Normal.of(a, y, usual), 0.1).full, with_them)
    # the others are corrected all the same
    assert share(with_them, a[usual], y[usual], usual[usual]) < 0.4


def test_sums_add_and_scale() -> None:
    a, y, usual = data()
    whole = Normal.of(a, y, usual)
    parts = Normal.of(a[:20], y[:20], usual[:20]) + Normal.of(a[20:], y[20:], usual[20:])
    twice = whole * 2
    for one, two, three in zip(vars(whole).values(), vars(parts).values(), vars(twice).values(), strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(two), rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(torch.as_tensor(three), 2 * torch.as_tensor(one))
    assert whole.weight == N - 2
    torch.testing.assert_close(Fit(twice, 0.3).full, Fit(whole, 0.3).full)


def test_inputs_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing enters"):
        Fit(Normal.of(torch.zeros(4, IN), torch.ones(4, OUT), torch.ones(4, dtype=torch.bool)), 1.0)


# --- patches


def logits(model: Any, ids: list[int] | None = None) -> Tensor:
    found: Tensor = model(input_ids=torch.tensor([ids or list(range(10, 25))]), use_cache=False).logits[0]
    return found


def random_patch(model: Any, ranks: list[int | None], seed: int = 0) -> Patch:
    """Changes of all writers, ranks in turn; None is a full matrix."""
    generator = torch.Generator().manual_seed(seed)
    changes, transposed = {}, set()
    writers = [writer for each in Layers(model).writers for writer in each]
    for place, writer in enumerate(writers):
        width, out = shape_of(writer.linear)
        rank = ranks[place % len(ranks)]
        if rank is None:
            changes[writer.name] = Change(0.1 * torch.randn(out, width, generator=generator))
        else:
            up, down = (torch.randn(shape, generator=generator) for shape in ((out, rank), (rank, width)))
            changes[writer.name] = Change(0.1 * up, down)
        if not isinstance(writer.linear, torch.nn.Linear):
            transposed.add(writer.name)
    return Patch(changes, frozenset(transposed))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("ranks", [[3], [1, 4, 2]])
def test_peft_reads_a_low_rank_patch(architecture: str, strength: float, ranks: list[int], tmp_path: Path) -> None:
    from peft import PeftModel

    model = tiny_model(architecture)
    plain = logits(model)
    patch = random_patch(model, list(ranks)).at(strength)
    patch.save(tmp_path, "base/model", torch.float32)
    with patched(model, patch):
        expected = logits(model)
    assert (expected - plain).abs().max() > 0.1
    loaded = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path))
    assert loaded.peft_config["default"].base_model_name_or_path == "base/model"
    torch.testing.assert_close(logits(loaded), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(loaded.merge_and_unload()), expected, atol=1e-4, rtol=1e-4)
    with patched(model, Patch.load(tmp_path)):
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("ranks", [[None], [2, 5]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_patch_survives_the_disk(
    architecture: str, ranks: list[int | None], dtype: torch.dtype, tmp_path: Path
) -> None:
    patch = random_patch(tiny_model(architecture), ranks)
    patch.save(tmp_path / "new", "base", dtype)
    found = Patch.load(tmp_path / "new")
    assert found.transposed == patch.transposed
    assert found.full == patch.full == (ranks == [None])
    assert found.count() == patch.count() == sum(change.count() for change in patch.changes.values())
    assert set(found.changes) == set(patch.changes)
    for name, change in patch.changes.items():
        assert torch.equal(found.changes[name].up, change.up.to(dtype))
        assert found.changes[name].rank == change.rank
        assert torch.equal(found.delta(name), Patch({name: change.to(dtype)}, patch.transposed).delta(name))
    patch.at(0.5).save(tmp_path / "half", "base", torch.float32)
    half = Patch.load(tmp_path / "half")
    for name in patch.changes:
        torch.testing.assert_close(half.delta(name), 0.5 * patch.delta(name))


def test_a_folder_without_a_patch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no patch"):
        Patch.load(tmp_path)


def test_what_a_change_adds_is_what_it_does_to_the_linear() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, IN, generator=generator)
    up, down = torch.randn(OUT, 2, generator=generator), torch.randn(2, IN, generator=generator)
    for change in (Change(up, down), Change(up @ down)):
        torch.testing.assert_close(change.apply(inputs), torch.nn.functional.linear(inputs, up @ down))
    assert (Change(up, down).rank, Change(up).rank) == (2, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patched_weights_are_given_back_to_the_bit(dtype: torch.dtype) -> None:
    model = tiny_model("gpt2").to(dtype)
    before = copy.deepcopy(model.state_dict())
    patch = random_patch(model, [3, None])

    def same() -> bool:
        return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    with patched(model, patch) as inside:
        assert inside is model
        for name in patch.changes:
            weight = model.get_submodule(name).weight
            expected = (before[f"{name}.weight"].float() + patch.delta(name)).to(dtype)
            assert torch.equal(weight, expected)
    assert same()
    with patched(model, patch.at(0.0)):
        assert same()
    with pytest.raises(RuntimeError, match="inside"), patched(model, patch):
        raise RuntimeError("inside")
    assert same()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.0.mlp.up_proj", Change(torch.ones(32, 48)), r"is \[48, 32\] in the model, \[32, 48\] in the"),
        ("model.layers.7.mlp.up_proj", Change(torch.ones(48, 32)), "has no linear model.layers.7.mlp.up_proj"),
        ("model.layers.0.mlp", Change(torch.ones(48, 32)), "has no linear model.layers.0.mlp"),
    ],
)
def test_a_patch_of_another_model_is_refused_whole(name: str, change: Change, message: str) -> None:
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    patch = Patch({"model.layers.0.self_attn.o_proj": Change(torch.ones(32, 32)), name: change})
    with pytest.raises(SurgeryError, match=message), patched(model, patch):
        pass
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("ranks", [[None], [3]])
def test_folding_a_patch_into_tensors_is_patching_the_model(
    architecture: str, ranks: list[int | None], tmp_path: Path
) -> None:
    model = tiny_model(architecture).to(torch.bfloat16)
    patch = random_patch(model, ranks)
    before = copy.deepcopy(model.state_dict())
    fold, bare = Folding(patch), Folding(patch)
    # checkpoints of a decoder alone have no prefix
    prefix = f"{next(iter(patch.changes)).split('.')[0]}."
    with patched(model, patch):
        for name, tensor in before.items():
            kept = tensor.clone()
            assert torch.equal(fold(name, tensor), model.state_dict()[name])
            assert torch.equal(bare(name.removeprefix(prefix), tensor), model.state_dict()[name])
            assert torch.equal(tensor, kept)
    fold.finish(tmp_path)
    bare.finish(tmp_path)
    fold = Folding(patch)
    missing = min(patch.changes)
    for name, tensor in before.items():
        if name != f"{missing}.weight":
            fold(name, tensor)
    with pytest.raises(SurgeryError, match=f"no tensor for {missing}"):
        fold.finish(tmp_path)


# --- truncated SVDs


def weights(model: Any) -> Callable[[str], Tensor]:
    return lambda name: model.get_submodule(name).weight


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_large_budget_gives_the_targets_weights(architecture: str) -> None:
    model = tiny_model(architecture)
    target = nearby(model, 1, 0.3)
    layers = Layers(model)
    inside = {
        name
        for name, module in model.named_modules()
        if name.startswith(f"{layers.path}.")
        and (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D")
        and not name.endswith("dt_proj")  # of Mamba: not called as a linear
    }
    for tokens in (None, TOKENS):
        patch = svd_patch(layers, weights(target), 10**9, tokens=tokens, dtype=torch.float32)
        assert set(patch.changes) == inside
        with patched(model, patch):
            for name in patch.changes:
                torch.testing.assert_close(
                    weights(model)(name), weights(target)(name), atol=1e-4, rtol=1e-3, msg=lambda text, n=name: n + text
                )
    assert untouched(model)


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_at_low_rank_it_is_the_truncated_difference(architecture: str, rank: int) -> None:
    model = tiny_model(architecture)
    target = nearby(model, 1, 0.3)
    layers = Layers(model)
    cost = sum(sum(module.weight.shape) for module in layers.linears().values())
    budget = rank * cost + cost // 2
    patch = svd_patch(layers, weights(target), budget, dtype=torch.float32)
    assert patch.count() <= budget
    for name, change in patch.changes.items():
        assert change.rank == rank
        wanted = weights(target)(name) - weights(model)(name)
        u, s, vh = torch.linalg.svd(wanted, full_matrices=False)
        # few directions of many are found by iteration: near-equal singular values mix, and cost next to nothing
        assert float((wanted - patch.delta(name)).norm() / s[rank:].norm()) <= 1 + 1e-3
        if rank * 4 >= len(s):
            expected = (u[:, :rank] * s[:rank]) @ vh[:rank]
            torch.testing.assert_close(patch.delta(name), expected, atol=1e-4, rtol=1e-4)
    assert {change.rank for change in svd_patch(layers, weights(target), 0).changes.values()} == {1}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mamba"])
def test_with_tokens_outputs_on_them_are_nearer(architecture: str) -> None:
    model = tiny_model(architecture)
    target = nearby(model, 1, 0.3)
    layers = Layers(model)
    budget = 2 * sum(sum(module.weight.shape) for module in layers.linears().values())
    inputs: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, name=name: inputs.setdefault(name, []).append(given[0].reshape(-1, given[0].shape[-1]))
        )
        for name, module in layers.linears().items()
    ]
    for ids in TOKENS.sequences:
        model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()

    def error(patch: Patch, name: str) -> float:
        left = weights(target)(name) - weights(model)(name) - patch.delta(name)
        return float((torch.cat(inputs[name]) @ (left if name in patch.transposed else left.T)).norm())

    plain = svd_patch(layers, weights(target), budget, dtype=torch.float32)
    informed = svd_patch(layers, weights(target), budget, tokens=TOKENS, dtype=torch.float32)
    assert plain.count() == informed.count()
    gains = [error(informed, name) / error(plain, name) for name in inputs]
    assert max(gains) <= 1.001
    assert sum(gains) / len(gains) < 0.97


def test_experts_that_see_some_tokens_only_are_left_alone() -> None:
    model, target = routed(0), routed(1)
    patch = svd_patch(Layers(model), weights(target), 10**9, tokens=TOKENS)
    assert {name.split(".", 3)[3].split("_proj")[0] for name in patch.changes} == {
        f"self_attn.{letter}" for letter in "qkvo"
    }


def test_linears_without_a_counterpart_are_left_alone() -> None:
    model = tiny_model()
    given = {"model.layers.0.mlp.up_proj": torch.ones(48, 32), "model.layers.0.mlp.down_proj": torch.ones(48, 32)}
    assert set(svd_patch(Layers(model), given.get, 10**6).changes) == {"model.layers.0.mlp.up_proj"}


# --- distillation


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_distillation_lowers_the_divergence_and_leaves_the_model(architecture: str) -> None:
    model = tiny_model(architecture)
    target = nearby(model, 1, 0.3)
    before = copy.deepcopy(model.state_dict())
    names = [writer.name for writers in Layers(model).writers for writer in writers]
    settings: dict[str, Any] = {"rank": 4, "steps": 40, "lr": 2e-2, "batch": 6, "seed": 0, "dtype": torch.float32}
    cache = capture(target, TOKENS)
    patch, losses = distil(model, names, cache, Head(target), **settings)
    assert len(losses) == 40
    assert losses[-1] < 0.7 * losses[0]
    assert untouched(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert set(patch.changes) == set(names)
    assert {change.rank for change in patch.changes.values()} == {4}

    def mean_kl() -> float:
        """Over whole texts, each read alone."""
        found = []
        for ids in TOKENS.sequences:
            wanted, given = (torch.log_softmax(logits(each, ids.tolist()), -1) for each in (target, model))
            found.append((wanted.exp() * (wanted - given)).sum(-1))
        return float(torch.cat(found).mean())

    # all texts are in a batch: the first loss is that of the model as it is
    assert losses[0] == pytest.approx(mean_kl(), rel=1e-4)
    with patched(model, patch):
        assert mean_kl() == pytest.approx(losses[-1], rel=0.1)
    again, _ = distil(model, names, cache, Head(target), **settings)
    assert all(torch.equal(again.changes[name].up, change.up) for name, change in patch.changes.items())


def test_distillation_that_diverges_says_so() -> None:
    model = tiny_model()
    target = nearby(model, 1)
    settings: dict[str, Any] = {"rank": 2, "steps": 5, "lr": float("inf"), "batch": 2, "seed": 0}
    with pytest.raises(SurgeryError, match="diverged at step"):
        distil(model, ["model.layers.0.mlp.down_proj"], capture(target, TOKENS), Head(target), **settings)
    assert untouched(model)


# --- the target's residuals


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_residuals_are_what_hooks_see(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    states = write_residuals(Layers(model), TOKENS, tmp_path)
    assert torch.equal(states, capture(model, TOKENS).states)
    residuals = Residuals(tmp_path)
    expected = seen_by_hooks(model, architecture) if WRITERS[architecture] else []
    for index, (_, layer) in enumerate(expected):
        for place, rows in enumerate(layer):
            torch.testing.assert_close(residuals(index, place), rows, atol=1e-4, rtol=1e-4)
    for layer, writer in ((2, 0), (0, len(WRITERS[architecture]))):
        with pytest.raises(SurgeryError, match=f"no linear {writer} in layer {layer}"):
            residuals(layer, writer)


# --- the gate


TEXTS = Tokens.of([list(range(start, start + 12)) for start in range(5, 75, 7)], [4] * 10)


def pair() -> tuple[HiddenCache, HiddenCache, Head, Head]:
    model = tiny_model()
    target = nearby(model, 1, 0.3)
    return capture(model, TEXTS), capture(target, TEXTS), Head(model), Head(target)


def test_divergence_is_the_kl_of_torch_distributions() -> None:
    merged, target, head, head_target = pair()
    found = divergence(merged.states, target.states, head, head_target)
    p, q = (
        torch.distributions.Categorical(logits=h(s)) for h, s in ((head_target, target.states), (head, merged.states))
    )
    torch.testing.assert_close(found, torch.distributions.kl_divergence(p, q), atol=1e-5, rtol=1e-4)
    assert divergence(merged.states[:0], target.states[:0], head, head_target).shape == (0,)
    # a target with more tokens: those that both have
    few = divergence(merged.states, target.states, lambda states: head(states)[:, :50], head_target)
    p, q = (
        torch.distributions.Categorical(logits=h(s)[:, :50])
        for h, s in ((head_target, target.states), (head, merged.states))
    )
    torch.testing.assert_close(few, torch.distributions.kl_divergence(p, q), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("factor", "strength"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.5), (4.0, 0.25), (4 / 3, 0.75), (-1.0, 0.0), (30.0, 0.0)]
)
def test_the_strength_undoes_what_overshoots(factor: float, strength: float) -> None:
    merged, target, head, _ = pair()
    step = factor * (target.states - merged.states)
    # one head for both, so that the target's states are best
    gate = choose_strength(merged, target, lambda s: merged.states + s * step, head, head)
    assert gate.strength == strength
    assert list(gate.kl) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert gate.prompts == 10
    assert gate.kl[strength] == min(gate.kl.values())
    assert gate.row()["kl"]["0.25"] == gate.kl[0.25]


def test_noise_is_refused() -> None:
    merged, target, head, head_target = pair()
    noise = torch.randn(merged.states.shape, generator=torch.Generator().manual_seed(0))
    gate = choose_strength(merged, target, lambda s: merged.states + s * noise, head, head_target)
    assert gate.strength == 0


def test_a_gain_on_one_prompt_of_many_is_within_its_error() -> None:
    merged, target, head, _ = pair()
    noise = torch.randn(merged.states.shape, generator=torch.Generator().manual_seed(0))
    states = merged.states + 0.02 * noise
    states[:12] = target.states[:12]
    gate = choose_strength(merged, target, lambda s: states, head, head)
    assert gate.kl[1.0] < gate.kl[0.0]
    assert gate.strength == 0
    # on all but one it is not
    states = target.states.clone()
    states[:12] = merged.states[:12]
    assert choose_strength(merged, target, lambda s: states, head, head).strength > 0


def test_the_gates_numbers_are_means_over_responses() -> None:
    """KL over states that predict a token of a response; the error is that of the mean gain over prompts."""
    merged, target, head, head_target = pair()
    gate = choose_strength(merged, target, lambda s: target.states, head, head_target, strengths=(1.0,))
    sums = []
    for states in (merged.states, target.states):
        p = torch.distributions.Categorical(logits=head_target(target.states))
        found = torch.distributions.kl_divergence(p, torch.distributions.Categorical(logits=head(states)))
        sums.append(found.reshape(10, 12)[:, 3:11])
    assert gate.kl[0.0] == pytest.approx(float(sums[0].mean()), rel=1e-4)
    assert gate.kl[1.0] == pytest.approx(float(sums[1].mean()), rel=1e-4, abs=1e-6)
    gains = (sums[0] - sums[1]).mean(1)
    assert gate.error == pytest.approx(float(gains.std()) / 10**0.5, rel=1e-3)


def test_one_strength_for_all_is_one_that_none_loses_by() -> None:
    def gate(strength: float, *kl: float) -> Gate:
        return Gate(strength, dict(zip((0.0, 0.5, 1.0), kl, strict=True)), 0.0, 4)

    one, two, three = gate(1.0, 4.0, 2.0, 1.0), gate(0.5, 0.2, 0.1, 0.15), gate(0.5, 1.0, 0.9, 1.1)
    assert joint_strength([one]) == 1.0
    assert joint_strength([two]) == 0.5
    assert joint_strength([one, one, two]) == 1.0
    assert joint_strength([one, one, three]) == 0.5
    assert joint_strength([gate(0.0, 1.0, 0.99, 0.98)] * 2) == 0.0
    assert joint_strength([one, gate(0.0, 1.0, 1.1, 1.2)]) == 0.0
    assert joint_strength([]) == 0.0


def test_how_many_prompts_are_held_back() -> None:
    assert [held_back(count) for count in (0, 1, 2, 5, 10, 100)] == [0, 0, 1, 1, 2, 20]


# --- fits


def texts(count: int, seed: int, span: tuple[int, int] = (3, VOCABULARY)) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(18, 30, (count,), generator=generator).tolist()
    return Tokens.of([torch.randint(*span, (length,), generator=generator).tolist() for length in lengths])


def averaged(one: Any, two: Any) -> Any:
    model = copy.deepcopy(one)
    other = two.state_dict()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_((tensor + other[name]) / 2)
    return model


def family(architecture: str, changed: str = "layers", size: float = 0.2) -> tuple[Any, list[Any]]:
    """A merged model and the two fine-tunes that it is the mean of: all in the layers is tuned, or writers alone."""
    base = granite() if architecture == "granite" else tiny_model(architecture)
    layers = Layers(base)
    writers = [writer.name for each in layers.writers for writer in each]
    kept = [f"{name}.weight" for name in writers] if changed == "writers" else [f"{layers.path}."]
    targets = [nearby(base, seed, size) for seed in (1, 2)]
    for target in targets:
        before = base.state_dict()
        for name, tensor in target.state_dict().items():
            if not name.startswith(tuple(kept)):
                tensor.copy_(before[name])
    return averaged(*targets), targets


def lesson(target: Any, tokens: Tokens, folder: Path, held: int, name: str = "a", known: bool = False) -> Lesson:
    """A target's residuals, and its weights where these are `known`."""
    folder.mkdir(exist_ok=True)
    write_residuals(Layers(target), tokens, folder)
    return Lesson(name, tokens, Residuals(folder), held, weights(target) if known else None)


def distance(one: Any, two: Any, tokens: Tokens) -> float:
    """Mean squared difference of final states."""
    return float((capture(one, tokens).states - capture(two, tokens).states).square().mean())


def same_weights(model: Any, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_first_writer_is_the_ridge_regression_of_what_hooks_see(tmp_path: Path) -> None:
    merged, (target, _) = family("llama")
    tokens = texts(12, 0)
    (inputs, mine), (_, theirs) = (seen_by_hooks(model, "llama", tokens)[0] for model in (merged, target))
    a, y = inputs[0], mine[0] - theirs[0]
    expected = least_squares(a, y, torch.ones(len(a), dtype=torch.bool), 1.0)
    # nothing held back: ridge 1
    found = repair(Layers(merged), [lesson(target, tokens, tmp_path, 0)], rank=None, dtype=torch.float32)
    change = found.patch.changes["model.layers.0.self_attn.o_proj"]
    torch.testing.assert_close(-change.up.T, expected.float(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_first_reader_is_the_compromise_between_the_targets_weights(architecture: str, tmp_path: Path) -> None:
    """Least squares on the rows of both domains, each with its own target's outputs and counted by its tokens."""
    merged, targets = family(architecture)
    name = {"llama": "model.layers.0.self_attn.k_proj", "gpt2": "transformer.h.0.attn.c_attn"}[architecture]
    tokens = [texts(count, count) for count in (12, 20)]
    lessons, rows, outputs = [], [], []
    for place, (target, read) in enumerate(zip(targets, tokens, strict=True)):
        lessons.append(lesson(target, read, tmp_path / str(place), 0, str(place), known=True))
        entered: list[Tensor] = []
        hook = merged.get_submodule(name).register_forward_pre_hook(lambda _, given, to=entered: to.append(given[0][0]))
        for ids in read.sequences:
            merged(input_ids=ids[None], use_cache=False)
        hook.remove()
        a = torch.cat(entered) / len(read.ids) ** 0.5
        difference = weights(merged)(name) - weights(target)(name)
        rows.append(a)
        outputs.append(a @ (difference if architecture == "gpt2" else difference.T))
    expected = least_squares(
        torch.cat(rows), torch.cat(outputs), torch.ones(len(torch.cat(rows)), dtype=torch.bool), 1.0
    )
    found = repair(Layers(merged), lessons, rank=None, dtype=torch.float32)
    delta = found.patch.delta(name)
    torch.testing.assert_close(-(delta if architecture == "gpt2" else delta.T), expected.float(), atol=1e-4, rtol=1e-3)


BOTH = ["llama", "gpt2", "neox", "falcon", "mixtral", "mamba", "granite"]


@pytest.mark.parametrize(
    ("architecture", "known"),
    # no linear of Gemma 2 writes to the residual stream: the target's weights are all there is to go by
    [*((name, known) for name in BOTH for known in (False, True)), ("gemma2", True)],
)
@pytest.mark.parametrize("rank", [None, 6])
def test_a_repaired_model_is_nearer_on_texts_it_has_not_seen(
    architecture: str, known: bool, rank: int | None, tmp_path: Path
) -> None:
    merged, (target, _) = family(architecture)
    before = copy.deepcopy(merged.state_dict())
    tokens, other = texts(60, 0), texts(10, 1)
    layers = Layers(merged)
    found = repair(layers, [lesson(target, tokens, tmp_path, 10, known=known)], rank=rank, dtype=torch.float32)
    assert same_weights(merged, before)
    assert untouched(merged)
    plain = distance(merged, target, other)
    with patched(merged, found.patch):
        left = distance(merged, target, other) / plain
        if rank is None and known:
            # what has no linear is left: Mixtral's experts, Mamba's convolution and more
            assert left < {"mixtral": 0.5, "mamba": 0.4}.get(architecture, 0.01)
        else:
            assert left < (0.75 if known else 0.9)
        torch.testing.assert_close(found.states["a"], capture(merged, tokens).states, atol=1e-3, rtol=1e-3)
    kind = "llama" if architecture == "granite" else architecture
    names = {*WRITERS[kind], *(name for segment in READERS[kind] for group in segment for name in group)}
    rows = [row["linear"] for row in found.choices]
    assert len(rows) == len(set(rows))
    assert set(rows) == {f"{layers.path}.{index}.{name}" for index in range(2) for name in names}
    assert all(set(row) == {"linear", "ridge", "rank", "left"} for row in found.choices)
    assert set(found.patch.changes) == {row["linear"] for row in found.choices if row["rank"] != 0}
    assert {name.split(f"{layers.path}.")[1][2:] for name in found.patch.changes} <= (
        names if known else set(WRITERS[kind])
    )
    assert found.patch.full == (rank is None)
    if rank is not None:
        assert found.patch.count() <= rank * sum(sum(merged.get_submodule(name).weight.shape) for name in rows)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "neox", "falcon", "granite"])
def test_what_the_writers_alone_have_unlearnt_comes_back(architecture: str, tmp_path: Path) -> None:
    """The regression is exact then: nothing but the ridge is left."""
    merged, (target, _) = family(architecture, "writers")
    other = texts(10, 1)
    before = distance(merged, target, other)
    found = repair(Layers(merged), [lesson(target, texts(60, 0), tmp_path, 10)], rank=None, dtype=torch.float32)
    with patched(merged, found.patch):
        assert distance(merged, target, other) < 0.02 * before


@pytest.mark.parametrize("known", [False, True])
def test_one_patch_for_two_domains_is_nearer_to_both(known: bool, tmp_path: Path) -> None:
    """Both were tuned alike, and merging with the untuned model has halved it."""
    _, (target, _) = family("llama")
    merged = averaged(tiny_model(), target)
    spans = {"a": (3, 50), "b": (50, VOCABULARY)}
    tokens, other = ({name: texts(40, seed, span) for name, span in spans.items()} for seed in (0, 1))
    before = {name: distance(merged, target, other[name]) for name in spans}
    lessons = [lesson(target, tokens[name], tmp_path / name, 6, name, known) for name in spans]
    found = repair(Layers(merged), lessons, rank=None, dtype=torch.float32)
    assert set(found.states) == set(spans)
    with patched(merged, found.patch):
        for name in spans:
            assert distance(merged, target, other[name]) < (0.01 if known else 0.8) * before[name]
            torch.testing.assert_close(found.states[name], capture(merged, tokens[name]).states, atol=1e-3, rtol=1e-3)


def test_states_are_those_of_the_patch_as_it_is_stored(tmp_path: Path) -> None:
    merged, (target, _) = family("llama")
    tokens = texts(20, 0)
    found = repair(Layers(merged), [lesson(target, tokens, tmp_path, 4, known=True)], rank=4)
    assert {change.up.dtype for change in found.patch.changes.values()} == {torch.bfloat16}
    found.patch.save(tmp_path / "patch", "base")
    with patched(merged, Patch.load(tmp_path / "patch")):
        torch.testing.assert_close(found.states["a"], capture(merged, tokens).states, atol=1e-3, rtol=1e-3)


def test_a_model_that_is_the_target_is_left_alone(tmp_path: Path) -> None:
    model = tiny_model()
    found = repair(Layers(model), [lesson(model, texts(10, 0), tmp_path, 2, known=True)], rank=None)
    assert not found.patch.changes
    assert all(row["rank"] == 0 for row in found.choices)


def test_only_the_linears_that_were_named_are_changed(tmp_path: Path) -> None:
    merged, (target, _) = family("llama")
    tokens = texts(30, 0)
    given = [lesson(target, tokens, tmp_path, 5, known=True)]
    for only in (["down_proj"], ["o_proj"], ["gate_proj", "o_proj"]):
        found = repair(Layers(merged), given, rank=6, only=only, dtype=torch.float32)
        assert {name.rsplit(".", 1)[-1] for name in found.patch.changes} == set(only)
        assert {row["linear"].rsplit(".", 1)[-1] for row in found.choices} == set(only)
        cost = sum(sum(weights(merged)(row["linear"]).shape) for row in found.choices)
        assert 0 < found.patch.count() <= 6 * cost
        with patched(merged, found.patch):
            torch.testing.assert_close(found.states["a"], capture(merged, tokens).states, atol=1e-3, rtol=1e-3)


def test_models_without_such_linears_are_refused(tmp_path: Path) -> None:
    given = [Lesson("a", TOKENS, Residuals(tmp_path), 1)]
    with pytest.raises(SurgeryError, match="LlamaForCausalLM has no linear that can be repaired among wo, w2"):
        repair(Layers(tiny_model()), given, rank=4, only=["wo", "w2"])


def test_an_error_midway_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    merged, (target, _) = family("llama")
    before = copy.deepcopy(merged.state_dict())
    given = lesson(target, texts(20, 0), tmp_path, 4, known=True)
    changed: list[bool] = []
    (tmp_path / "layer-001.safetensors").unlink()
    layers = Layers(merged)
    hook = merged.model.layers[1].register_forward_pre_hook(lambda *_: changed.append(not same_weights(merged, before)))
    with pytest.raises(SurgeryError, match="no linear 0 in layer 1"):
        repair(layers, [given], rank=None)
    hook.remove()
    assert any(changed)
    assert same_weights(merged, before)
    assert untouched(merged)


def test_mixtral_is_repaired_behind_its_attention_alone(tmp_path: Path) -> None:
    merged, (target, _) = family("mixtral")
    found = repair(Layers(merged), [lesson(target, texts(30, 0), tmp_path, 5)], rank=4)
    assert found.patch.changes
    assert all(name.endswith("self_attn.o_proj") for name in found.patch.changes)

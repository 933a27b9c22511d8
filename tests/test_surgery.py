"""Surgery modules and losses against the paper's equations, written out token by token in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from suture.errors import StoreError, SurgeryError
from suture.gate import at_strength
from suture.losses import LOSSES, Batch, get_loss
from suture.states import HiddenCache, Tokens
from suture.surgery import MODULES, Surgery, load_surgery, make_surgery, save_surgery

H, R, T_MAX, V = 12, 3, 5, 17
POSITIONS = torch.tensor([0, 1, 4, 5, 6, 300])  # the last three are past the table


def random_module(name: str) -> Surgery:
    module = make_surgery(name, H, R, T_MAX)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def bottleneck(content: torch.nn.Module, h: Tensor) -> Tensor:
    return content.up.weight.double() @ (content.down.weight.double() @ h).clamp(min=0)


def literal(name: str, module: Surgery, h: Tensor, t: int) -> Tensor:
    """Corrected state of one token: Eq. 3, Eq. 4 and the variants of Table 11."""
    if name in ("affine", "linear"):
        down, up = module.down.weight.double(), module.up.weight.double()
        return h - up @ (down @ h) - (module.up.bias.double() if name == "affine" else 0)
    row = torch.zeros(H, dtype=torch.float64)
    if name == "cosine":
        phase = min(math.log(1 + t) / math.log(T_MAX), 1.0)
        for k in range(8):
            row += math.cos(math.pi * k * phase) * module.weights[k].double()
        return h - bottleneck(module.content, h) - row
    if name != "standard" and t < T_MAX:
        row = module.table.rows[t].double()
    if name == "standard":
        return h - bottleneck(module.content, h)
    if name == "darts":
        return h - bottleneck(module.content, h) - row
    if name == "add":
        return h - bottleneck(module.content, h + row)
    assert name == "parallel"
    return h - bottleneck(module.content, h) - bottleneck(module.position, row)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_module_equals_its_equation(name: str) -> None:
    module = random_module(name)
    h = torch.randn(6, H, generator=torch.Generator().manual_seed(1))
    expected = torch.stack(
        [literal(name, module, state.double(), int(t)) for state, t in zip(h, POSITIONS, strict=True)]
    )
    torch.testing.assert_close(module(h, POSITIONS).double(), expected, atol=1e-5, rtol=1e-5)
    batched = module(h.view(2, 3, H), POSITIONS.view(2, 3))
    torch.testing.assert_close(batched.view(6, H), module(h, POSITIONS))


@pytest.mark.parametrize("name", sorted(MODULES))
def test_new_module_is_the_identity_but_can_learn(name: str) -> None:
    module = make_surgery(name, H, R, T_MAX)
    h = torch.randn(6, H)
    assert torch.equal(module(h, POSITIONS), h)
    (module(h, POSITIONS) ** 2).sum().backward()
    up = module.up if name in ("affine", "linear") else module.content.up
    assert float(up.weight.grad.abs().sum()) > 0
    if name == "cosine":
        assert bool((module.weights.grad.abs().sum(1) > 0).all())
    if name == "parallel":  # a zero embedding would never get a gradient
        assert float(module.position.up.weight.grad.abs().sum()) > 0


def test_parameter_counts_and_stored_sizes_of_the_paper(tmp_path: Path) -> None:
    """Table 8, Table 11 and Table 13: H = 4096, r = 16, T_max = 512."""
    counts = {name: make_surgery(name, 4096, 16, 512).parameter_count() for name in MODULES}
    assert counts["standard"] == 131_072
    assert counts["darts"] == counts["add"] == 2_228_224
    assert counts["add"] - counts["standard"] == 2_097_152  # 2.1M
    assert counts["parallel"] - counts["standard"] == 2_228_224  # 2.2M
    assert counts["cosine"] == 131_072 + 8 * 4096
    assert make_surgery("cosine", 4096, 16, 512, waves=3).parameter_count() == 131_072 + 3 * 4096
    assert make_surgery("standard", 4096, 128).parameter_count() == 1_048_576
    for name, size in (("standard", 262_144), ("darts", 4_456_448)):
        save_surgery(make_surgery(name, 4096, 16, 512), tmp_path / name)
        stored = (tmp_path / name / "surgery.safetensors").stat().st_size
        assert size < stored < size + 1024


@pytest.mark.parametrize("name", sorted(MODULES))
def test_module_survives_the_disk_in_bfloat16(name: str, tmp_path: Path) -> None:
    module = random_module(name)
    save_surgery(module, tmp_path)
    found = load_surgery(tmp_path)
    assert type(found) is MODULES[name]
    for key, tensor in module.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor.bfloat16().float())
    assert json.loads((tmp_path / "surgery.json").read_text()) == {
        "module": name,
        "hidden": H,
        "rank": R,
        "t_max": T_MAX,
        **({"waves": 8} if name == "cosine" else {}),
        "strength": 1.0,
    }


@pytest.mark.parametrize("name", sorted(MODULES))
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_the_strength_is_kept_and_multiplies_the_correction(name: str, strength: float, tmp_path: Path) -> None:
    states = torch.randn(2, 3, H, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(3).expand(2, 3)
    module = random_module(name)
    full = states - module(states, positions)
    module.strength = strength
    save_surgery(module, tmp_path, torch.float32)
    found = load_surgery(tmp_path)
    assert found.strength == strength
    torch.testing.assert_close(found(states, positions), states - strength * full, atol=1e-5, rtol=1e-5)
    if strength == 0:
        assert torch.equal(found(states, positions), states)
    tokens = Tokens.of([[1, 2, 3], [4, 5, 6]])
    at = at_strength(found, HiddenCache(tokens, states.reshape(6, H)))
    torch.testing.assert_close(at(strength).view(2, 3, H), found(states, positions))
    assert torch.equal(at(0.0), states.reshape(6, H))


def test_a_module_without_a_strength_is_from_before_there_was_one(tmp_path: Path) -> None:
    save_surgery(random_module("darts"), tmp_path)
    settings = json.loads((tmp_path / "surgery.json").read_text())
    del settings["strength"]
    (tmp_path / "surgery.json").write_text(json.dumps(settings))
    assert load_surgery(tmp_path).strength == 1


def test_the_number_of_waves_survives_the_disk(tmp_path: Path) -> None:
    save_surgery(make_surgery("cosine", H, R, T_MAX, waves=3), tmp_path)
    found = load_surgery(tmp_path)
    assert json.loads((tmp_path / "surgery.json").read_text())["waves"] == 3
    assert found.weights.shape == (3, H)


def test_cosines_are_bounded_and_level_off_without_a_step_or_a_kink() -> None:
    t_max = 100
    module = make_surgery("cosine", H, R, t_max)
    module.weights.data.normal_(generator=torch.Generator().manual_seed(0))
    module.requires_grad_(False)
    table = module.correction(torch.zeros(300, H), torch.arange(300))  # [300, H]; c(0) is 0
    assert bool((table.abs() <= module.weights.abs().sum(0) + 1e-5).all())
    last = table[t_max - 1]
    assert float(last.abs().max()) > 0.1
    torch.testing.assert_close(table[t_max:], last.expand(200, H))
    far = torch.tensor([10**4, 10**6, 10**9])
    torch.testing.assert_close(module.correction(torch.zeros(3, H), far), last.expand(3, H))
    jumps = (table[1:] - table[:-1]).abs().amax(1)  # [299]
    assert float(jumps[t_max - 4 : t_max + 4].max()) < 0.05 * float(jumps.max())  # slope 0 from both sides
    # before the first token there is padding, whose states nobody reads: only not a number would spread
    assert bool(module.correction(torch.zeros(1, H), torch.tensor([-1])).isfinite().all())


def batch_of(n: int = 7) -> tuple[Tensor, Batch, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    corrected, target = (torch.randn(n, H, generator=generator) for _ in range(2))
    head, head_target = (torch.randn(size, H, generator=generator) for size in (V, V + 2))
    entropy = torch.rand(n, generator=generator)
    batch = Batch(target, entropy, lambda states: states @ head.T, lambda states: states @ head_target.T)
    return corrected, batch, head.double(), head_target.double()


def literal_loss(name: str, corrected: Tensor, batch: Batch, head: Tensor, head_target: Tensor) -> float:
    total, weights = 0.0, 0.0
    assert batch.entropy is not None
    mean_entropy = sum(float(value) for value in batch.entropy.double()) / len(corrected)
    for c, h, e in zip(corrected.double(), batch.target.double(), batch.entropy.double(), strict=True):
        distance = float((c - h).abs().sum()) / H
        p_star = torch.softmax((head_target @ h)[:V], 0)
        log_p = torch.log_softmax(head @ c, 0)
        total += {
            "l1": distance,
            "ewl1": float(e) / mean_entropy * distance,
            "l2": float(((c - h) ** 2).sum()) / H,
            "ewl2": float(e) / mean_entropy * float(((c - h) ** 2).sum()) / H,
            "kl": float((p_star * (p_star.log() - log_p)).sum()),
            "ce": -float(log_p[int(p_star.argmax())]),
        }[name]
        weights += 1
    return total / weights


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_loss_equals_its_equation(name: str) -> None:
    """Eq. 5, Eq. 6 and Table 5's others; the target's vocabulary has two more rows."""
    corrected, batch, head, head_target = batch_of()
    found = float(get_loss(name)(corrected, batch))
    assert found == pytest.approx(literal_loss(name, corrected, batch, head, head_target), rel=1e-5)


@pytest.mark.parametrize("name", ["kl", "ce"])
def test_chunked_losses_have_the_gradient_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    corrected, batch, _, _ = batch_of(11)
    gradients = []
    for rows in (100, 3):
        monkeypatch.setattr("suture.losses.ROWS", rows)
        leaf = corrected.clone().requires_grad_(True)
        get_loss(name)(leaf, batch).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-5)


def test_constant_entropy_makes_ewl1_equal_l1() -> None:
    corrected, batch, _, _ = batch_of()
    same = Batch(batch.target, torch.full((7,), 2.5))
    torch.testing.assert_close(LOSSES["ewl1"](corrected, same), LOSSES["l1"](corrected, same))


@pytest.mark.parametrize(("weighted", "plain"), [("ewl1", "l1"), ("ewl2", "l2")])
def test_power_and_floor_of_entropies(weighted: str, plain: str) -> None:
    corrected, batch, _, _ = batch_of()
    entropy = batch.entropy
    assert entropy is not None

    def loss(name: str, power: float, floor: float) -> Tensor:
        return LOSSES[name](corrected, Batch(batch.target, entropy, power=power, floor=floor))

    assert torch.equal(loss(weighted, 1, 0), LOSSES[weighted](corrected, batch))
    assert torch.equal(loss(weighted, 0, 0.3), LOSSES[plain](corrected, batch))
    for power, floor in ((2, 0), (0.5, 0), (1, 0.4), (1.5, 0.6)):
        weights = [max(float(value), floor) ** power for value in entropy]
        distance = (corrected - batch.target).abs() ** (2 if plain == "l2" else 1)
        expected = sum(w * float(d.mean()) for w, d in zip(weights, distance, strict=True)) / sum(weights)
        assert float(loss(weighted, power, floor)) == pytest.approx(expected, rel=1e-5)
    # far above every entropy the floor makes all tokens alike
    torch.testing.assert_close(loss(weighted, 1, 50), LOSSES[plain](corrected, batch))


def test_an_entropy_that_rounding_made_negative_has_a_root() -> None:
    corrected, batch, _, _ = batch_of()
    entropy = torch.tensor([-1e-7, 1, 1, 1, 1, 1, 1])
    assert bool(LOSSES["ewl1"](corrected, Batch(batch.target, entropy, power=0.5)).isfinite())


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(SurgeryError, match="did you mean 'darts'"):
        make_surgery("dart", H)
    with pytest.raises(SurgeryError, match="did you mean 'ewl1'"):
        get_loss("wewl1")
    with pytest.raises(SurgeryError, match="rank is 13, above the width of the states, 12"):
        make_surgery("darts", H, 13)
    with pytest.raises(SurgeryError, match="waves is 0"):
        make_surgery("cosine", H, 2, waves=0)
    with pytest.raises(StoreError, match="holds no surgery module"):
        load_surgery(tmp_path)

"""The router of a recipe: fitted on its calibration prompts, measured on held-out text and on text of no domain."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from suture.capture import capture
from suture.corrections import AUTO
from suture.corrections import Surgery as Wanted
from suture.errors import RecipeError
from suture.evaluate.heldout import perplexity, score_heldout
from suture.pipeline import Run
from suture.router import DEVIATIONS, HARM, SHRINKAGES, Router, fit_router
from suture.states import HiddenCache, Tokens
from suture.store import write_json
from suture.surgery import Surgery, load_surgery

PREFIXES = (8, 16, 32, 64)  # tokens of a guard text that are taken for a prompt, besides all of it


@dataclass(frozen=True)
class Routed:
    """What a router does with one domain's held-out prompts, and what that leaves of the correction.

    Attributes:
        kl: domain → nats of the merged model, under the domain's correction, and under the one the router chose; None
            where the correction acts inside the layers.
    """

    domain: str
    prompts: int
    right: int
    abstained: int
    misrouted: int
    kl: dict[str, float] | None


@dataclass(frozen=True)
class Outside:
    """What a router does with text of no domain.

    Attributes:
        prefix: how many tokens of each text are the prompt; None: all.
        perplexity: uncorrected and routed, of what follows the prompt, or of all where nothing does; None as `kl`.
    """

    prefix: int | None
    texts: int
    abstained: int
    perplexity: dict[str, float] | None


@dataclass(frozen=True)
class Routing:
    """How well a router does, and what it costs."""

    surgery: str
    domains: list[Routed]
    outside: list[Outside]

    def row(self) -> dict[str, Any]:
        """As plain data, with shares over all domains: `accuracy` is of the prompts on which it decided."""
        prompts = sum(each.prompts for each in self.domains)
        abstained = sum(each.abstained for each in self.domains)
        right = sum(each.right for each in self.domains)
        whole = next((each for each in self.outside if each.prefix is None), None)
        return {
            "accuracy": right / (prompts - abstained) if prompts > abstained else None,
            "abstained": abstained / prompts,
            "outside_abstained": whole.abstained / whole.texts if whole else None,
            "surgery": self.surgery,
            "by_domain": {each.domain: asdict(each) | {"gap_closed": _gaps(each.kl)} for each in self.domains},
            "outside": [asdict(each) for each in self.outside],
        }


class Switch(Surgery):
    """The module that a router chooses for each sequence by its prompt's last state, until the next prompt comes.

    For `attach`. A prompt is read in one pass, padded on the left where it is padded, and continued with a cache.

    Args:
        surgeries: in the order of the router's domains.
    """

    def __init__(self, router: Router, surgeries: Sequence[Surgery]) -> None:
        super().__init__(surgeries[0].hidden)
        self.router, self.surgeries = router, nn.ModuleList(surgeries)
        self.choices = torch.empty(0, dtype=torch.long)  # [B] of the last prompts; -1 where it abstained

    def forward(self, states: Tensor, positions: Tensor) -> Tensor:
        """Corrected states, [B, T, H], in the dtype they came in; positions [B or 1, T]."""
        if bool((positions == 0).any()):  # no step behind a cache has a first token
            self.choices = self.router(states[:, -1])
        out = states
        for index, surgery in enumerate(self.surgeries):
            rows = (self.choices == index)[:, None, None]
            if bool(rows.any()):
                out = torch.where(rows, surgery(states, positions), out)
        return out


def prompt_ends(cache: HiddenCache) -> Tensor:
    """[S, H] states of the last token of each prompt."""
    return cache.states[cache.tokens.starts + cache.tokens.prompt_lengths - 1]


def fit(job: Run) -> Router:
    """A router between a recipe's domains, in their order; made once, and then found in the store.

    Raises:
        StoreError: when the states of the calibration prompts are not captured yet.
        SurgeryError: for fewer than 3 calibration prompts of a domain.
    """
    inputs = router_inputs(job)
    found = job.store.find("router", inputs)
    if found is None:
        router = fit_router([prompt_ends(job.states(member, job.splits[0])[0]) for member in job.members.values()])
        with job.store.create("router", inputs) as folder:
            save_file(dict(router.state_dict()), folder / "router.safetensors")
            write_json(folder / "router.json", {"domains": list(job.members)})
        return router
    tensors = load_file(found.path / "router.safetensors")
    count, hidden = tensors["centres"].shape
    router = Router(hidden, count)
    router.load_state_dict(tensors)
    return router


def router_inputs(job: Run) -> dict[str, Any]:
    """What makes a router: the merged model, the calibration prompts of each domain, in order, and the settings."""
    # the states of prompts are the same with what a target wrote behind them and without
    prompts = [(name, member.calibration.fingerprint()) for name, member in job.members.items()]
    settings = {"shrinkages": SHRINKAGES, "deviations": DEVIATIONS, "harm": HARM}
    return {"model": job.fingerprint, "dtype": str(job.dtype), "prompts": prompts, "settings": settings}


def routable(job: Run, label: str | None) -> Wanted:
    """The correction to route: by its label; by default the recipe's last that acts on the final states.

    Raises:
        RecipeError: for one inside the layers, with those that can be routed.
    """
    known = [each for each in job.recipe.surgery if not each.inside]
    if label is not None:
        named = job.surgery(label)
        if named.inside:
            raise RecipeError(_refusal(named.label, known))
        return named
    if not known:
        raise RecipeError(_refusal("every correction of this recipe", known))
    # `auto` may choose a change inside the layers, which is known only once it has chosen
    return next((each for each in reversed(known) if each.module != AUTO), known[-1])


def modules(job: Run, surgery: Wanted) -> dict[str, Surgery]:
    """Each domain's module of one correction; made if that has not been done.

    Raises:
        RecipeError: where it acts inside the layers, with those that can be routed.
    """
    made = {name: job.calibrate(member, surgery) for name, member in job.members.items()}
    for name, artifact in made.items():
        if not (artifact.path / "surgery.json").exists():
            others = [each for each in job.recipe.surgery if not each.inside and each.label != surgery.label]
            raise RecipeError(_refusal(f"{surgery.label} of domain {name}", others))
    return {name: load_surgery(artifact.path) for name, artifact in made.items()}


def _refusal(what: str, others: Sequence[Wanted]) -> str:
    labels = ", ".join(each.label for each in others)
    return (
        f"{what} acts inside the layers, where a router cannot switch it while the prompt is read: name a domain, or "
        + (f"choose one on the final states: --surgery {labels}" if labels else "add one on the final states")
    )


def measure(job: Run, label: str | None = None) -> Routing:
    """What the router does with held-out prompts and with text of no domain, and what that does to the scores.

    Args:
        label: of the correction that is routed; the recipe's last by default.

    Raises:
        StoreError: when states are not captured yet.
    """
    surgery = job.surgery(label)
    made = {name: job.calibrate(member, surgery) for name, member in job.members.items()}
    last = all((artifact.path / "surgery.json").exists() for artifact in made.values())
    inputs = {
        "router": job.store.key("router", router_inputs(job)),
        "surgery": [artifact.key for artifact in made.values()],
        "label": surgery.label,
        "heldout": [job.states_keys(member, "heldout") for member in job.members.values()],
        "guard": job.guard[1].fingerprint() if job.guard else None,
        "prefixes": PREFIXES,
    }
    found = job.store.find("routing", inputs)
    if found is None:
        router = fit(job)
        loaded = {name: load_surgery(artifact.path) for name, artifact in made.items()} if last else None
        domains = [_score(job, name, router, loaded) for name in job.members]
        guard = _guard_states(job)
        outside = _outside(job, guard, router, loaded) if guard else []
        with job.store.create("routing", inputs) as folder:
            kept = {"domains": [asdict(each) for each in domains], "outside": [asdict(each) for each in outside]}
            write_json(folder / "routing.json", kept)
        return Routing(surgery.label, domains, outside)
    kept = json.loads((found.path / "routing.json").read_text())
    return Routing(
        surgery.label, [Routed(**each) for each in kept["domains"]], [Outside(**each) for each in kept["outside"]]
    )


def corrected(cache: HiddenCache, choices: Tensor, surgeries: Sequence[Surgery]) -> HiddenCache:
    """A cache in which each sequence is corrected by the module that [S] `choices` says; -1 leaves it as it is."""
    owner = torch.repeat_interleave(choices, cache.tokens.lengths)  # [N]
    states, positions = cache.states.clone(), cache.tokens.positions
    for index, surgery in enumerate(surgeries):
        mine = owner == index
        states[mine] = surgery(states[mine], positions[mine])
    return HiddenCache(cache.tokens, states)


@torch.inference_mode()
def _score(job: Run, name: str, router: Router, surgeries: Mapping[str, Surgery] | None) -> Routed:
    """One domain's held-out prompts."""
    member = job.members[name]
    merged, target = job.states(member, "heldout")
    choices = router(prompt_ends(merged))  # [S]
    right = int((choices == list(job.members).index(name)).sum())
    abstained = int((choices < 0).sum())
    kl = None
    if surgeries is not None:
        acting: dict[str, Surgery | HiddenCache] = {"corrected": surgeries[name]}
        if right < len(choices):
            acting["routed"] = corrected(merged, choices, list(surgeries.values()))
        heads = job.merged_head, job.head(member.fingerprint)
        stage = f"score {name}, routed"
        scores = score_heldout(name, merged, target, acting, *heads, progress=job.progress, stage=stage)
        kl = {each.model: each.value for each in scores if each.metric == "kl" and each.model != "target"}
        kl.setdefault("routed", kl["corrected"])
    return Routed(name, len(choices), right, abstained, len(choices) - right - abstained, kl)


def _guard_states(job: Run) -> HiddenCache | None:
    """States of the merged model on the guard text that takes part in no fit, kept where `Run.score_guard` keeps them.

    Not in inference mode: a model that is made there cannot be patched afterwards.
    """
    if job.guard is None:
        return None
    inputs = job.patched_inputs("", job.guard[1])
    if job.store.find("states", inputs) is None:
        with job.store.create("states", inputs) as folder:
            capture(job.model, job.guard[1], progress=job.progress, stage="read guard text, merged").save(folder)
    return HiddenCache.load(job.store.get("states", inputs).path)


@torch.inference_mode()
def _outside(job: Run, whole: HiddenCache, router: Router, surgeries: Mapping[str, Surgery] | None) -> list[Outside]:
    """Text of no domain, read to its end and at several prefixes."""
    found = []
    for prefix in (None, *PREFIXES):
        if prefix is not None and int(whole.tokens.lengths.min()) <= prefix:
            continue
        ends = whole.tokens.lengths if prefix is None else torch.full_like(whole.tokens.lengths, prefix)
        cache = HiddenCache(Tokens(whole.tokens.ids, whole.tokens.lengths, ends), whole.states)
        choices = router(prompt_ends(cache))  # [S]
        both = None
        if surgeries is not None:
            both = {"merged": perplexity(cache, job.merged_head)[0]}
            acts = bool((choices >= 0).any())
            routed = corrected(cache, choices, list(surgeries.values())) if acts else None
            both["routed"] = perplexity(routed, job.merged_head)[0] if routed else both["merged"]
        found.append(Outside(prefix, len(choices), int((choices < 0).sum()), both))
    return found


def _gaps(kl: Mapping[str, float] | None) -> dict[str, float] | None:
    """Shares of the merged model's KL that are gone, under the domain's correction and under the routed one."""
    if kl is None or not kl["merged"] > 0:
        return None
    return {name: 1 - kl[name] / kl["merged"] for name in ("corrected", "routed")}

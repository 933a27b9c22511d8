"""Merging, all of it by mergekit's own engine: to disk, or tensor by tensor into a model in memory.

Adapters are never written out as full checkpoints: mergekit reads them through a loader that adds B A to a base tensor
when that tensor's turn comes. Only this file and engine.py import mergekit.
"""

from __future__ import annotations

import copy
import importlib.metadata
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from suture.checkpoint import Checkpoint, parse_reference, resolve
from suture.engine import Engine, check_method, configuration_class, elects_signs, one_line, unknown_parameters
from suture.errors import MergeError, did_you_mean
from suture.family import check_family
from suture.models import DTYPES, load_tokenizer, model_from_tensors
from suture.progress import SILENT, Progress
from suture.sidecars import copy_code, copy_tokenizer, generation_config
from suture.store import FileHashes, digest, need_disk


@dataclass(frozen=True)
class Weight:
    """What one parent contributes: as written, and as it takes effect after normalisation and mergekit's `lambda`.

    Attributes:
        model: as the configuration names it.
        given: None where it varies by tensor.
        effective: None where it varies by tensor, or by element: methods that elect signs divide each element by the
            weights of the parents that agree there.
        density: None where nothing is dropped.
        by_element: whether that is so.
    """

    model: str
    given: float | None
    effective: float | None
    density: float | None
    by_element: bool = False

    def sentence(self) -> str:
        """One line for people."""
        given = "by tensor" if self.given is None else f"{self.given:g}"
        effective = "by tensor" if self.effective is None else f"{self.effective:g}"
        if self.by_element:
            effective = f"{given} over the weights that agree at each element"
        changed = "" if given == effective or self.by_element else f" (written {given})"
        density = "" if self.density is None else f", density {self.density:g}"
        return f"weight {effective}{changed}{density}: {self.model}"


class Merge:
    """A mergekit configuration whose parents are found and fit together; nothing is loaded yet."""

    def __init__(
        self, config: Mapping[str, Any], folder: Path, *, seed: int = 0, trust_remote_code: bool = False
    ) -> None:
        from pydantic import ValidationError

        self.seed = seed
        self.trust_remote_code = trust_remote_code
        self.written = dict(config)
        check_method(self.written.get("merge_method"))
        kind = configuration_class()
        try:
            parsed = kind.model_validate(config)
        except (ValidationError, RuntimeError) as error:
            raise MergeError(f"merge: mergekit refuses this configuration: {one_line(error)}") from error
        unknown = sorted(set(config) - set(kind.model_fields))
        if unknown:
            raise MergeError(f"merge.{unknown[0]}: unknown field; {did_you_mean(unknown[0], kind.model_fields)}")
        self.parents: dict[str, Checkpoint] = {}
        self.config = self._placed(parsed, folder)
        self.resized = bool(self.config.tokenizer_source or self.config.tokenizer)
        self.notes = check_family(self.parents, rows_may_differ=self.resized) + unknown_parameters(parsed)

    def _placed(self, config: Any, folder: Path) -> Any:
        """The configuration with every model found and replaced by its local folder, wherever it names one."""
        from mergekit.common import ModelPath, ModelReference
        from pydantic import BaseModel

        def local(reference: Any) -> Any:
            name = str(reference)
            if name not in self.parents:
                self.parents[name] = resolve(parse_reference(name, folder))
            found = self.parents[name]
            return ModelReference(
                model=ModelPath(path=str(found.base)),
                lora=ModelPath(path=str(found.adapter)) if found.adapter else None,
                override_architecture=reference.override_architecture,
            )

        def walk(value: Any) -> Any:
            if isinstance(value, ModelReference):
                return local(value)
            if isinstance(value, BaseModel):
                return value.model_copy(update={name: walk(getattr(value, name)) for name in type(value).model_fields})
            if isinstance(value, dict):
                return {key: walk(entry) for key, entry in value.items()}
            return [walk(entry) for entry in value] if isinstance(value, list) else value

        if config.base_model:
            local(config.base_model)  # the first parent gives config and tokenizer
        return walk(config)

    @cached_property
    def engine(self) -> Engine:
        """mergekit's plan for this merge."""
        parents = list(self.parents.values())
        return Engine(self.config, parents, seed=self.seed, trust_remote_code=self.trust_remote_code)

    @property
    def donor(self) -> Checkpoint:
        """The parent whose config and tokenizer the merged model gets: the base, else the first."""
        return next(iter(self.parents.values()))

    def fingerprint(self, hashes: FileHashes) -> str:
        """A hash of the configuration with parents replaced by their contents, the seed and mergekit's version."""
        text = self.config.model_dump(mode="json", exclude_none=True)
        # local folders differ between machines: contents do not
        places = {}
        for parent in self.parents.values():
            placed = str(parent.base) + (f"+{parent.adapter}" if parent.adapter else "")
            places[placed] = parent.fingerprint(hashes)
        found = {
            "config": _replaced(text, places),
            "parents": list(places.values()),
            "seed": self.seed,
            "mergekit": importlib.metadata.version("mergekit"),
        }
        if self.resized:
            files = [file for parent in self.parents.values() for file in sorted(parent.base.glob("tokenizer*"))]
            found["tokenizers"] = [hashes.of(file) for file in files]
        return digest(found)

    def need(self) -> int:
        """Bytes of the merged weights, about: the donor's numbers in the dtype that is written."""
        written = self.config.out_dtype or self.config.dtype
        if not written:
            return self.donor.size
        return self.donor.count * DTYPES[written].itemsize if written in DTYPES else self.donor.size

    @cached_property
    def weights(self) -> list[Weight]:
        """The weights that take effect: given ones divided by their sum where the method normalises.

        Raises:
            MergeError: for what mergekit cannot plan, and adapters that cannot be read.
        """
        from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask

        planned = [save.tensor_task for save in self.engine.saves]
        tasks = [task for task in planned if isinstance(task, ExecuteMergeMethodTask)]
        given: dict[Any, dict[str, set[float]]] = {}
        normalised = False
        scales: set[float] = set()
        for task in tasks:
            scales.add(float(task.parameters.get("lambda", 1.0)))
            normalised = normalised or bool(task.parameters.get("normalize", False))
            for model, values in task.input_parameters.items():
                for key in ("weight", "density"):
                    value = values.get(key)
                    if isinstance(value, (int, float)):
                        given.setdefault(model, {}).setdefault(key, set()).add(float(value))
        names = {
            (str(parent.base), str(parent.adapter) if parent.adapter else None): name
            for name, parent in self.parents.items()
        }
        single = {model: _single(values.get("weight")) for model, values in given.items()}
        known = [value for value in single.values() if value is not None]
        elected = normalised and elects_signs(self.config.merge_method)
        # what all weights are multiplied by: mergekit's `lambda` over their sum; None where no one number tells it
        factor = _single(scales)
        if normalised and factor is not None:
            total = math.fsum(known)
            factor = factor / total if total and len(known) == len(single) and not elected else None
        rows = []
        sparse = any(value < 1 for values in given.values() for value in values.get("density", ()))
        for model, values in given.items():
            name = names.get((model.model.path, model.lora.path if model.lora else None), str(model))
            weight = single[model]
            effective = weight * factor if weight is not None and factor is not None else None
            density = _single(values.get("density")) if sparse else None
            rows.append(Weight(name, weight, effective, density, elected))
        return sorted(rows, key=lambda row: list(self.parents).index(row.model) if row.model in self.parents else 99)

    def tensors(self, progress: Progress = SILENT) -> Iterator[tuple[str, Tensor]]:
        """Merged tensors one by one, each checked to be finite; at no time are all parents in memory.

        Raises:
            MergeError: naming the first tensor that is not finite, or what mergekit refused.
        """
        from mergekit.common import dtype_from_name
        from mergekit.graph import Executor

        plan = {save.tensor_task: save for save in self.engine.saves}
        with torch.random.fork_rng(), self.engine, progress.stage("merge", len(plan)) as advance:
            torch.manual_seed(self.seed)
            try:
                for task, value in Executor(targets=list(plan)).run(quiet=True):
                    advance(1)
                    save = plan[task]
                    if value is None and not save.optional:
                        raise MergeError(f"mergekit gave no value for tensor {save.tensor_name}")
                    if value is None:
                        continue
                    if save.dtype:
                        value = value.to(dtype_from_name(save.dtype))
                    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                        raise MergeError(
                            f"merged tensor {save.tensor_name} is not finite: a parent is broken, or its dtype is too "
                            "small for this method (try dtype: float32 in the merge)"
                        )
                    yield save.tensor_name, value
            except (RuntimeError, ValueError, KeyError, OSError) as error:
                raise MergeError(f"mergekit stopped: {one_line(error)}") from error

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that mergekit builds where `tokenizer_source` or `tokenizer` asks for one, else None.

        Raises:
            MergeError: for what mergekit cannot build.
        """
        from mergekit.graph import Executor

        tasks = self.engine.tokenizers
        try:
            return (
                next((info.tokenizer for _, info in Executor(targets=tasks).run(quiet=True)), None) if tasks else None
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise MergeError(f"merge: mergekit cannot build the tokenizer: {one_line(error)}") from error

    def config_out(self) -> Any:
        """The merged model's config, by mergekit's rules."""
        from mergekit.merge import _update_config_vocab

        config = copy.deepcopy(self.engine.model_config)
        if self.resized and self.tokenizer is not None:
            padding = self.config.tokenizer.pad_to_multiple_of if self.config.tokenizer else None
            _update_config_vocab(config, self.engine.architecture, self.tokenizer, pad_to_multiple_of=padding)
        return config

    def model(self, dtype: torch.dtype, device: torch.device, progress: Progress = SILENT) -> Any:
        """The merged model in memory; no checkpoint is written."""
        tensors = {name: tensor.to(dtype) for name, tensor in self.tensors(progress)}
        model = model_from_tensors(self.config_out(), tensors, dtype, device)
        model.generation_config = generation_config(self._folders)
        return model

    def write(
        self, folder: Path, progress: Progress = SILENT, change: Callable[[str, Tensor], Tensor] | None = None
    ) -> None:
        """The merged checkpoint in an empty folder: shards, configs, tokenizer, mergekit_config.yml.

        Args:
            change: (tensor's name, tensor) → what is written instead.
        """
        from mergekit.io.tensor_writer import TensorWriter

        need_disk(folder, self.need(), "the merged checkpoint")
        folder.mkdir(parents=True, exist_ok=True)
        writer = TensorWriter(str(folder), max_shard_size=5_000_000_000, safe_serialization=True)
        for name, merged in self.tensors(progress):
            tensor = change(name, merged) if change is not None else merged
            writer.save_tensor(name=name, tensor=tensor.contiguous(), clone=False)
        writer.finalize()
        self.config_out().save_pretrained(folder)
        generation_config(self._folders).save_pretrained(folder)
        copy_code(self.donor.base, folder)
        self._write_tokenizer(folder)
        (folder / "mergekit_config.yml").write_text(yaml.safe_dump(self.written, sort_keys=False), encoding="utf-8")

    def _write_tokenizer(self, folder: Path) -> None:
        """The built tokenizer or the donor's, with the chat template that the configuration asks for."""
        from mergekit.merge import _set_chat_template

        tokenizer = self.tokenizer
        if tokenizer is None and not self.config.chat_template:
            return copy_tokenizer(self.donor.base, folder)
        tokenizer = tokenizer or load_tokenizer(self.donor.base, trust_remote_code=self.trust_remote_code)
        try:
            _set_chat_template(tokenizer, self.config)
        except RuntimeError as error:
            raise MergeError(f"merge.chat_template: {one_line(error)}") from error
        tokenizer.save_pretrained(folder)

    @property
    def _folders(self) -> list[Path]:
        """The parents' folders, the donor's first."""
        return list(dict.fromkeys(parent.base for parent in self.parents.values()))


def _single(values: set[float] | None) -> float | None:
    return next(iter(values)) if values and len(values) == 1 else None


def _replaced(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(entry, places) for key, entry in value.items()}
    if isinstance(value, list):
        return [_replaced(entry, places) for entry in value]
    return places.get(value, value) if isinstance(value, str) else value

"""mergekit's engine as suture drives it: its configuration in a fixed order, its plan, and readers for its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suture.adapter import AdapterReader
from suture.checkpoint import Checkpoint
from suture.errors import MergeError, did_you_mean


def merge_methods() -> list[tuple[str, str]]:
    """(name, full name) of every method that mergekit has."""
    from mergekit.merge_methods.registry import registered_methods

    return sorted((method.spec.name, method.spec.pretty_name or method.spec.name) for method in registered_methods())


def check_method(name: Any) -> None:
    """Refuse a merge method that mergekit does not have.

    Raises:
        MergeError: with the nearest.
    """
    known = [method for method, _ in merge_methods()]
    if name is None:
        raise MergeError(f"merge.merge_method: missing; known: {', '.join(known)}")
    if name not in known:
        raise MergeError(f"merge.merge_method: unknown method {name!r}; {did_you_mean(str(name), known)}")


def elects_signs(name: str) -> bool:
    """Whether a method keeps, at each element, only the parents that agree in sign (TIES and its relatives)."""
    from mergekit import merge_methods

    return getattr(merge_methods.get(name), "consensus_method", None) is not None


def unknown_parameters(config: Any) -> list[str]:
    """Notes on parameters that a merge method does not have: mergekit passes over them in silence."""
    from mergekit import merge_methods

    spec = merge_methods.get(config.merge_method).spec
    known = {parameter.name for parameter in (*spec.shared_parameters, *spec.input_parameters)}
    notes = []

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for entry in value:
                walk(entry)
        elif hasattr(value, "model_fields_set"):
            for word in getattr(value, "parameters", None) or {}:
                if word not in known:
                    hint = did_you_mean(word, known) if known else "it has none"
                    notes.append(f"merge: {config.merge_method} has no parameter {word!r}, so it does nothing; {hint}")
            for field in ("models", "slices", "sources"):
                walk(getattr(value, field, None))
            for module in (getattr(value, "modules", None) or {}).values():
                walk(module)

    walk(config)
    return list(dict.fromkeys(notes))


def configuration_class() -> Any:
    """mergekit's configuration class, with the models it names in a fixed order.

    mergekit gives them as a set: which parent lends its config, and the ids of added tokens, would change from one
    process to the next.
    """
    from mergekit.config import MergeConfiguration

    class Ordered(MergeConfiguration):  # type: ignore[misc]
        def referenced_models(self) -> list[Any]:
            first = [self.base_model] if self.base_model else []
            rest = sorted(set(super().referenced_models()) - set(first), key=self._written_order)
            return first + rest

        def _written_order(self, reference: Any) -> tuple[int, str]:
            written = [model.model for model in self.models or []]
            return (written.index(reference) if reference in written else len(written), str(reference))

    return Ordered


class Engine:
    """One configuration, with all models in local folders, and mergekit's plan for it.

    Raises:
        MergeError: for what mergekit knows no layout for, cannot plan, or adapters that cannot be read.
    """

    def __init__(self, config: Any, parents: list[Checkpoint], *, seed: int, trust_remote_code: bool) -> None:
        from mergekit.architecture import get_architecture_info
        from mergekit.io.tasks import SaveTensor
        from mergekit.merge import _model_out_config
        from mergekit.options import MergeOptions
        from mergekit.plan import MergePlanner
        from mergekit.tokenizer import BuildTokenizer

        self.config, self.parents, self.trust_remote_code = config, parents, trust_remote_code
        options = MergeOptions(trust_remote_code=trust_remote_code, random_seed=seed, quiet=True)
        with self:
            try:
                self.architecture = get_architecture_info(config, options)
                # before its vocabulary is known
                self.model_config = _model_out_config(config, self.architecture, trust_remote_code=trust_remote_code)
                # planning rewrites the configuration; nothing is written until its tasks run, and they never do
                own = config.model_copy(deep=True)
                tasks = MergePlanner(own, self.architecture, options, self.model_config).plan_to_disk("")
            except (RuntimeError, ValueError, OSError) as error:
                raise MergeError(f"merge: mergekit cannot plan this: {one_line(error)}") from error
        # a task a tensor, with its name and dtype, and the tokenizer's where one is to be built
        self.saves = [task for task in tasks if isinstance(task, SaveTensor)]
        self.tokenizers = [task for task in tasks if isinstance(task, BuildTokenizer)]

    def __enter__(self) -> None:
        """Fill mergekit's loader cache for the length of a block; parents of one base share its memory map."""
        from mergekit.common import ModelPath, ModelReference
        from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex
        from mergekit.io.tasks import LoaderCache

        cache = LoaderCache()
        cache.trust_remote_code = self.trust_remote_code
        shared: dict[Path, Any] = {}
        for parent in self.parents:
            if parent.base not in shared:
                shared[parent.base] = LazyTensorLoader(ShardedTensorIndex.from_disk(str(parent.base)))
            reader = shared[parent.base]
            lora = ModelPath(path=str(parent.adapter)) if parent.adapter else None
            reference = ModelReference(model=ModelPath(path=str(parent.base)), lora=lora)
            cache.loaders[reference] = AdapterReader(reader, parent) if parent.adapter else reader

    def __exit__(self, *error: object) -> None:
        from mergekit.io.tasks import LoaderCache

        LoaderCache().flush_all()
        LoaderCache().loaders.clear()


def one_line(error: Exception) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())

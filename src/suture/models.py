"""Language models in memory: loading, where a decoder keeps its last states, and the head that reads them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from suture.checkpoint import Checkpoint, parse_reference, resolve
from suture.errors import AttachError, ModelError, ResourceError
from suture.store import write_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str = "auto") -> torch.device:
    """`auto` is the first GPU, else the CPU.

    Raises:
        ModelError: for a device that torch does not know or that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device: torch knows no {name!r}; write auto, cpu, cuda, cuda:0 or mps") from error
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device: {name} was asked for, but torch cannot use it (`suture doctor` says why)") from error
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU, where the product of bfloat16 is slower."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder.

    Raises:
        ModelError: when the folder has none that transformers can read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: no tokenizer that transformers can read: {str(error).splitlines()[0]}") from error


def tokenizer_folder(checkpoint: Checkpoint) -> Path:
    """An adapter's own tokenizer where it brings one, else the base's."""
    if checkpoint.adapter and (checkpoint.adapter / "tokenizer_config.json").exists():
        return checkpoint.adapter
    return checkpoint.base


def need_memory(needed: int, what: str, device: torch.device) -> None:
    """Refuse before any work when a device has less than `needed` bytes free.

    Raises:
        ResourceError: with both figures in GB.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        import psutil

        free = int(psutil.virtual_memory().available)
    if free < needed:
        raise ResourceError(
            f"{what} needs about {needed / 1e9:.2f} GB of memory on {device}, {free / 1e9:.2f} GB are free: "
            "close other programs, choose a smaller dtype or another device"
        )


def load_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False
) -> Any:
    """A frozen causal language model in evaluation mode; an adapter is merged into its base by PEFT.

    Raises:
        ModelError: when weights are missing, left over, misshapen or not finite, or remote code is not allowed.
    """
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.base),
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            # straight to the GPU: host memory may be the smaller
            **({"device_map": {"": device}} if device.type == "cuda" else {}),
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(f"transformers cannot load {checkpoint.base}: {str(error).strip()}") from error
    check_loaded(info, str(checkpoint.base))
    if checkpoint.adapter:
        model = _with_adapter(model, checkpoint)
    check_finite(model, str(checkpoint.reference))
    return model.to(device).eval().requires_grad_(False)


def _with_adapter(model: Any, checkpoint: Checkpoint) -> Any:
    from peft import PeftModel

    try:
        adapted = PeftModel.from_pretrained(model, str(checkpoint.adapter))
        merged: Any = adapted.merge_and_unload()
    except (ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"PEFT cannot merge the adapter {checkpoint.adapter} into its base: {error}") from error
    return merged


def model_class(config: Any) -> Any:
    """The causal language model class of a config."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise ModelError(f"transformers has no causal language model of type {config.model_type!r}") from None


def model_from_tensors(config: Any, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> Any:
    """A frozen model around tensors that are in memory already; none is copied where the dtype is right.

    Raises:
        ModelError: when names or shapes do not fit the config.
    """
    model, info = model_class(config).from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
    )
    check_loaded(info, "the merged model")
    return model.to(device).eval().requires_grad_(False)


def empty_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """A model of a checkpoint's class without weights, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def check_loaded(info: dict[str, Any], name: str) -> None:
    """Refuse a model of which transformers had to invent or leave out weights."""
    faults = {
        "missing": info.get("missing_keys"),
        "not expected": info.get("unexpected_keys"),
        "of another shape": info.get("mismatched_keys"),
    }
    told = [
        f"{len(keys)} {what} ({', '.join(map(str, sorted(keys, key=str)[:5]))})"
        for what, keys in faults.items()
        if keys
    ]
    if told:
        raise ModelError(f"{name}: tensors {'; '.join(told)}: the weights do not fit the config")


def check_finite(model: nn.Module, name: str) -> None:
    """Refuse weights with NaN or infinity, by tensor name."""
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{name}: tensor {key} is not finite: the checkpoint is broken")


def load(
    reference: str, *, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """A frozen model and its tokenizer from a folder, a hub id, `base+adapter`, or an adapter alone.

    Returns:
        (model, tokenizer) as transformers gives them.

    Raises:
        ModelError: for anything that cannot be found, read or trusted.
    """
    checkpoint = resolve(parse_reference(reference))
    place = choose_device(device)
    model = load_model(checkpoint, choose_dtype(dtype, place), place, trust_remote_code=trust_remote_code)
    return model, load_tokenizer(tokenizer_folder(checkpoint), trust_remote_code=trust_remote_code)


def decoder_of(model: Any) -> tuple[str, Any]:
    """Path and module of the decoder, whose output is what the head reads.

    Raises:
        AttachError: for a model without one that suture can find.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        decoder = getattr(model, "base_model", None)
    if decoder is not None and decoder is not model:
        for name, module in model.named_modules():
            if module is decoder:
                return name, decoder
    raise AttachError(f"{type(model).__name__} has no decoder that can be found (get_decoder, base_model)")


def hidden_size(model: Any) -> int:
    """H, the width of the final hidden states."""
    return int(model.config.get_text_config().hidden_size)


class _Passed:
    """The output of a decoder that was given its last states: everything else is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Pass(nn.Module):
    """Stands where the decoder was and hands on the states that come in as embeddings."""

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any) -> _Passed:
        assert inputs_embeds is not None
        return _Passed(inputs_embeds)


class Head:
    """The part of a model that turns final hidden states into logits, soft-caps, scales and biases included.

    It is the model itself with its decoder taken out, so whatever its forward does to logits is done here. It keeps
    none of the decoder's weights.
    """

    def __init__(self, model: Any, path: str | None = None) -> None:
        path = path if path is not None else decoder_of(model)[0]
        self.model: Any = _shallow(model)
        node: nn.Module = self.model
        *parents, last = path.split(".")
        for part in parents:
            child = _shallow(getattr(node, part))
            node._modules[part] = child
            node = child
        node._modules[last] = _Pass()
        self.path = path

    @torch.inference_mode()
    def __call__(self, states: Tensor) -> Tensor:
        """[N, H] states → [N, V] logits in float32."""
        return self.differentiable(states)

    def differentiable(self, states: Tensor) -> Tensor:
        """As calling it, with gradients for the states."""
        weight = next(self.model.parameters())
        given = states.to(device=weight.device, dtype=weight.dtype)
        logits: Tensor = self.model(inputs_embeds=given[None], use_cache=False).logits[0]  # [N, V]
        return logits.float()

    def to(self, device: torch.device) -> Head:
        """Move the head's weights."""
        self.model.to(device)
        return self

    def save(self, folder: Path) -> None:
        """Write the head's weights and config into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}
        save_file(tensors, folder / "head.safetensors")
        self.model.config.save_pretrained(folder)
        write_json(folder / "head.json", {"decoder": self.path})

    @classmethod
    def load(cls, folder: Path, *, device: torch.device | None = None, trust_remote_code: bool = False) -> Head:
        """Read a head that `save` wrote; the decoder is never built in memory."""
        import json

        model = empty_model(folder, trust_remote_code=trust_remote_code)
        head = cls(model, json.loads((folder / "head.json").read_text())["decoder"])
        head.model.load_state_dict(load_file(folder / "head.safetensors", device=str(device or "cpu")), assign=True)
        head.model.eval().requires_grad_(False)
        return head


def _shallow(module: nn.Module) -> nn.Module:
    """A copy that shares parameters but not the dict of children, and runs its class's own forward.

    accelerate, for one, puts a forward on the instance that is bound to the original.
    """
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name in ("forward", "_old_forward", "_hf_hook"):
        twin.__dict__.pop(name, None)
    return twin

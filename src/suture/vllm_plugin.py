"""vLLM's plugin: `vllm serve` loads a checkpoint that `suture export` wrote without code from the checkpoint.

`pip install --no-deps suture` in vLLM's environment is enough. The domain of a request is
`SamplingParams(extra_args={"suture_domain": "math"})`, or `"vllm_xargs": {"suture_domain": "math"}` to the server.

vLLM looks classes up in this module by name, in each process that it starts. They are made when they are asked for.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from suture.vllm.names import DomainNames
from suture.vllm.slots import DOMAINS

__all__ = ["TYPES", "DomainNames", "register"]

# model type → vLLM's class; each was compared with transformers
TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}


def register() -> None:
    """Make vLLM know `Suture<Base>ForCausalLM` and `suture_<type>`; the entry point in `vllm.general_plugins`."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    from suture.vllm.model import checking_class

    for kind, base in TYPES.items():
        name = f"Suture{base}"
        AutoConfig.register(f"suture_{kind}", _config(kind), exist_ok=True)
        ModelRegistry.register_model(name, f"{__name__}:{name}")
        MODELS_CONFIG_MAP[name] = checking_class(MODELS_CONFIG_MAP.get(base, VerifyAndUpdateConfig), __name__)


@functools.cache
def _config(kind: str) -> type:
    from transformers import CONFIG_MAPPING

    base = CONFIG_MAPPING[kind]
    return type(f"Suture{base.__name__}", (base,), {"model_type": f"suture_{kind}", "__module__": __name__})


@functools.cache
def __getattr__(name: str) -> Any:
    base = name.removeprefix("Suture")
    if name.startswith(DOMAINS):
        from suture.vllm.model import domains_class

        return domains_class(name, json.loads(bytes.fromhex(name.removeprefix(DOMAINS))), __name__)
    if base != name and base in TYPES.values():
        from vllm import ModelRegistry

        from suture.vllm.model import corrected_class

        return corrected_class(ModelRegistry.models[base].load_model_cls(), name, __name__)
    if base != name and name.endswith("Config"):
        for kind in TYPES:
            if _config(kind).__name__ == name:
                return _config(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

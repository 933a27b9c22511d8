"""Random models of a few thousand parameters, one per architecture."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 101
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
# architecture → (config class, settings)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SHARED, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**SHARED, "sliding_window": None}),
    "qwen2": ("Qwen2Config", SHARED),
    "qwen3": ("Qwen3Config", SHARED),
    "gemma2": (
        "Gemma2Config",
        {**SHARED, "query_pre_attn_scalar": 8, "sliding_window": 8, "final_logit_softcapping": 5.0},
    ),
    "gemma3": ("Gemma3TextConfig", {**SHARED, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "gpt2": ("GPT2Config", GPT2),
    "neox": ("GPTNeoXConfig", SHARED),
    "phi3": ("Phi3Config", SHARED),
    "olmo2": ("Olmo2Config", SHARED),
    "mixtral": ("MixtralConfig", {**SHARED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "falcon": (
        "FalconConfig",
        {
            **{key: SHARED[key] for key in SHARED if key != "head_dim"},
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
        },
    ),
    "mamba": (
        "MambaConfig",
        {key: SHARED[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")}
        | {"state_size": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "bloom": ("BloomConfig", {**GPT2, "hidden_size": 32}),
    "opt": ("OPTConfig", {**SHARED, "ffn_dim": 48, "word_embed_proj_dim": 32}),
}


def tiny_model(architecture: str = "llama", seed: int = 0, **settings: Any) -> Any:
    """A random model in evaluation mode; the same seed gives the same weights."""
    name, kept = ARCHITECTURES[architecture]
    config = getattr(transformers, name)(**{**kept, **settings})
    config.architectures = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval().requires_grad_(False)


def nearby(model: Any, seed: int, size: float = 0.05) -> Any:
    """A fine-tune of a model: the same with noise on every weight."""
    import copy

    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for tensor in twin.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * size * tensor.std().clamp_min(1e-3))
    return twin


def tiny_tokenizer(chat: bool = False) -> Any:
    """A tokenizer with a token a letter, digit or sign: `a` is always the same token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = ["<pad>", "<s>", "</s>", "<unk>", *map(chr, range(32, 127))]
    inner = Tokenizer(models.WordLevel({token: index for index, token in enumerate(letters)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if chat:
        messages = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
        tokenizer.chat_template = "<s>" + messages + "{% if add_generation_prompt %}A:{% endif %}"
    return tokenizer

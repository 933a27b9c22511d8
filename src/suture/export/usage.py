"""How an export is used, engine by engine: the part of its model card that people copy from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from suture.checkpoint import read_json

THIS = "THIS_MODEL"  # stands for the repository's id, which `suture push` knows and an export does not
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM makes room for


def usage(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Sections of a model card: transformers, vLLM, llama.cpp, suture, lm_eval, each where the kind runs there."""
    kind, domain = manifest["to"], manifest["domains"][0]
    parts = [f"In what follows `{THIS}` is this repository, or a folder with its files.\n"]
    if kind in ("hf", "vllm"):
        parts += [_remote(manifest, domain), *_vllm(kind, domain)]
    elif kind == "adapter":
        parts += [_peft(manifest), _multi_lora(folder, manifest)]
    elif kind == "plain":
        parts += [_code("python", *_loading()), _vllm_plain()]
    else:
        parts += [_llama(folder)]
    if kind != "gguf":
        parts += [_suture(kind, manifest), _lm_eval(kind, domain)]
    return "\n".join([*parts, *_prompts(manifest)])


def _code(language: str, *lines: str) -> str:
    return "\n".join([f"```{language}", *lines, "```\n"])


def _loading(*options: str) -> list[str]:
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{THIS}")',
        f"model = AutoModelForCausalLM.from_pretrained({', '.join([json.dumps(THIS), *options])})",
        'inputs = tokenizer("...", return_tensors="pt")',
        *([] if options else ["print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))"]),
    ]


def _remote(manifest: Mapping[str, Any], domain: str) -> str:
    lines = [
        *_loading("trust_remote_code=True"),
        f"print(model.domains)  # {json.dumps(manifest['domains'])}",
        f'output = model.generate(**inputs, max_new_tokens=64, domain="{domain}")  # for this call',
        f'model.set_domain("{domain}")  # until the next call of set_domain',
        *(['model.set_domain("auto")  # the router chooses, prompt by prompt'] if manifest.get("router") else []),
        "model.set_domain(None)  # the merged model, uncorrected",
    ]
    return (
        "### transformers\n\nThe modelling code is in `modeling_suture.py`, which transformers runs only with "
        "`trust_remote_code=True`. A list of domains gives each row of a batch its own.\n\n" + _code("python", *lines)
    )


def _vllm(kind: str, domain: str) -> list[str]:
    chosen = json.dumps({"suture_domain": domain})
    plugin = (
        "With suture in vLLM's environment its plugin runs the corrections, and each request names its domain:\n\n"
        + _code("bash", f"vllm serve {THIS}")
        + "\n"
        + _code(
            "python",
            "from openai import OpenAI",
            "",
            'client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")',
            f'client.completions.create(model="{THIS}", prompt="...", extra_body={{"vllm_xargs": {chosen}}})',
        )
    )
    backend = "Without suture, vLLM's Transformers backend runs it with one domain for all requests:\n\n" + _code(
        "bash", f"vllm serve {THIS} --trust-remote-code --model-impl transformers --hf-overrides '{chosen}'"
    )
    # the one that the export is for comes first
    return ["### vLLM\n", *((plugin, backend) if kind == "vllm" else (backend, plugin))]


def _peft(manifest: Mapping[str, Any]) -> str:
    first, *others = manifest["domains"]
    slot = {name: name.replace(".", "_") for name in manifest["domains"]}  # PEFT takes no dot there

    def place(name: str) -> str:
        return f'subfolder="adapters/{name}", adapter_name="{slot[name]}"'

    lines = [
        *_loading(),
        "",
        "from peft import PeftModel",
        "",
        f'model = PeftModel.from_pretrained(model, "{THIS}", {place(first)})',
        *(f'model.load_adapter("{THIS}", {place(name)})' for name in others),
        f'model.set_adapter("{slot[first]}")',
        "with model.disable_adapter():",
        "    ...  # the merged model, uncorrected",
    ]
    return "### transformers and PEFT\n\nThe root is the merged model; each domain's correction is a LoRA.\n\n" + _code(
        "python", *lines
    )


def _multi_lora(folder: Path, manifest: Mapping[str, Any]) -> str:
    domains = manifest["domains"]
    rank = lora_rank([folder / "adapters" / domain for domain in domains]) or RANKS[-1]
    places = " ".join(f"{domain}=DIR/adapters/{domain}" for domain in domains)
    lines = [
        f"hf download {THIS} --local-dir DIR",
        f"vllm serve DIR --enable-lora --max-loras {len(domains) + 1} \\",
        f"    --max-lora-rank {rank} \\",
        f"    --lora-modules {places}",
    ]
    return "### vLLM\n\nA request chooses its domain by the name of the model.\n\n" + _code("bash", *lines)


def lora_rank(adapters: Iterable[Path]) -> int | None:
    """The least rank that vLLM makes room for and that holds every adapter's; None above the largest."""
    most = 1
    for adapter in adapters:
        settings = read_json(adapter / "adapter_config.json", "an adapter needs one")
        most = max(most, int(settings["r"]), *map(int, (settings.get("rank_pattern") or {}).values()))
    return next((rank for rank in RANKS if rank >= most), None)


def _vllm_plain() -> str:
    return "### vLLM\n\n" + _code("bash", f"vllm serve {THIS}")


def _llama(folder: Path) -> str:
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf"))
    lines = [f"hf download {THIS} --local-dir DIR", *(f"llama-server -m DIR/{file}" for file in files)]
    return "### llama.cpp\n\n" + _code("bash", *lines)


def _suture(kind: str, manifest: Mapping[str, Any]) -> str:
    chosen = "" if kind == "plain" else f" --domain {manifest['domains'][0]}"
    names = f"`{manifest['name']}` and `{manifest['name']}:<domain>`"
    return f"### suture\n\n`suture serve` speaks the OpenAI protocol; its models are {names}.\n\n" + _code(
        "bash", f"hf download {THIS} --local-dir DIR", f"suture chat DIR{chosen}", "suture serve DIR"
    )


def _lm_eval(kind: str, domain: str) -> str:
    model, lines = f"pretrained={THIS}", []
    if kind in ("hf", "vllm"):
        model += f",trust_remote_code=True,suture_domain={domain}"
    elif kind == "adapter":
        lines, model = [f"hf download {THIS} --local-dir DIR"], f"pretrained=DIR,peft=DIR/adapters/{domain}"
    lines.append(f"lm_eval --model hf --model_args {model} --tasks gsm8k")
    return "### lm_eval\n\n" + _code("bash", *lines)


def _prompts(manifest: Mapping[str, Any]) -> list[str]:
    """How each domain's prompts were written: other text is not what was calibrated and scored."""
    said = []
    for name, domain in (manifest["recipe"].get("domains") or {}).items():
        source = domain.get("prompts")
        template = source.get("template") if isinstance(source, Mapping) else None
        wrapped = " in the chat template" if domain.get("chat_template") else ""
        system = f", with the system message {json.dumps(domain['system'])}" if domain.get("system") else ""
        written = f"`{json.dumps(template, ensure_ascii=False)[1:-1]}`" if template else "the prompt as it is"
        said.append(f"- {name}: {written}{wrapped}{system}")
    return ["### Prompts\n\nCorrections were fitted and scored on prompts that were written like this:\n", *said, ""]

"""Export folders, read and opened: one way to talk to every kind of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suture.checkpoint import Checkpoint, Reference, read_json
from suture.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    import torch

FORMAT = 1
REMOTE = ("hf", "vllm")  # kinds that bring modelling code
KINDS = (*REMOTE, "plain", "adapter", "gguf")
NONE, AUTO = "none", "auto"  # what users write for "uncorrected" and for "as the router says"


@dataclass(frozen=True)
class Export:
    """An export folder's manifest. A domain is None (uncorrected), "auto" (the router's choice) or a name."""

    folder: Path
    kind: str
    name: str
    domains: tuple[str, ...]
    default: str | None
    router: bool
    manifest: dict[str, Any]

    @property
    def fixed(self) -> bool:
        """Whether the correction is part of the weights, so that there is nothing to switch."""
        return self.kind not in (*REMOTE, "adapter")

    @property
    def words(self) -> list[str]:
        """What `parse` knows: the domains, and `auto` and `none` where the export has them."""
        return [*self.domains, *([AUTO] if self.router else []), *([] if self.fixed else [NONE])]

    def parse(self, word: str) -> str | None:
        """A domain as users write it.

        Raises:
            ModelError: for a domain that the export does not have.
        """
        if word in self.words:
            return None if word == NONE and NONE not in self.domains else word
        if word == NONE:
            raise ModelError(f"{self.folder}: a {self.kind} export holds the corrected model only: no `none`")
        if word == AUTO:
            raise ModelError(f"{self.folder} has no router: name a domain ({', '.join(self.domains)})")
        raise ModelError(f"{self.folder}: unknown domain {word!r}; {did_you_mean(word, self.words)}")

    def adapter(self, domain: str) -> Path:
        """Where a domain's PEFT adapter is, in an adapter export."""
        return self.folder / "adapters" / domain


def open_export(folder: Path) -> Export:
    """Read an export folder's manifest; no weights are loaded.

    Raises:
        ModelError: for a folder that is no export, one that failed its verification, or a manifest that is broken or
            of a newer format.
    """
    file = folder / "suture.json"
    if (folder / "failed.json").exists():
        raise ModelError(f"{folder} is an export that failed its verification (failed.json says why): export it again")
    if not file.exists():
        if not folder.is_dir():
            raise ModelError(f"no such folder: {folder}")
        advice = "make one with `suture export RECIPE --out DIR`"
        if (folder / "adapter_config.json").exists():
            advice = "it is a PEFT adapter; give the export folder that it belongs to"
        elif (folder / "config.json").exists():
            advice = (
                "it is a checkpoint without corrections; transformers and vLLM load it as it is, and "
                "`suture export RECIPE --out DIR` makes an export"
            )
        elif (folder / "run.json").exists():
            advice = f"it is the folder of a run: `suture export {folder} --out DIR` makes an export of it"
        raise ModelError(f"{folder} is not an export, it has no suture.json: {advice}")
    manifest = read_json(file, "")
    if manifest.get("format") != FORMAT:
        raise ModelError(
            f"{file}: format {manifest.get('format')!r}, this suture reads {FORMAT}: export it again with this version"
        )
    kind, domains, default = manifest.get("to"), manifest.get("domains"), manifest.get("default")
    if kind not in KINDS:
        raise ModelError(f"{file}: to: unknown kind {kind!r}; {did_you_mean(str(kind), KINDS)}")
    if not isinstance(domains, list) or not domains or not all(isinstance(name, str) for name in domains):
        raise ModelError(f"{file}: domains: should be a list of names: export it again")
    name = str(manifest.get("name") or folder.resolve().name)
    found = Export(folder, kind, name, tuple(domains), default, manifest.get("router") is not None, manifest)
    if default is not None:
        found.parse(default)
    return found


class Opened:
    """An export's model in memory, with its tokenizer; calls of `generate` wait for each other."""

    def __init__(self, export: Export, model: Any, tokenizer: Any, peft: Any = None) -> None:
        self.export = export
        self.model = model
        self.tokenizer = tokenizer
        self.peft = peft
        self.lock = threading.Lock()

    def generate(self, *args: Any, domain: str | None, **kwargs: Any) -> Any:
        """`model.generate` with one domain's correction: a name, "auto", or None for the uncorrected model.

        A plain export has no uncorrected model, and does the same for each of its domains.
        """
        with self.lock, self._acting(domain) as more:
            return self.model.generate(*args, **kwargs, **more)

    @contextmanager
    def _acting(self, domain: str | None) -> Iterator[dict[str, Any]]:
        """What has to be passed to `generate` for a domain; adapters are switched inside the block."""
        if self.peft is None:
            yield {"domain": domain} if self.export.kind in REMOTE else {}
        elif domain is None:
            with self.peft.disable_adapter():
                yield {}
        else:
            self.peft.set_adapter(_slot(self.export, domain))
            yield {}


def open_model(export: Export, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False) -> Opened:
    """Load an export's model and tokenizer.

    Code in the folder runs only if it is byte for byte what this suture writes, or with `trust_remote_code`.

    Raises:
        ModelError: for a GGUF export, code that is not suture's own, and weights that do not fit.
    """
    from suture.models import load_model, load_tokenizer

    if export.kind == "gguf":
        raise ModelError(
            f"{export.folder} is a GGUF export, which llama.cpp reads: llama-cli -m FILE, llama-server -m FILE"
        )
    code = export.kind in REMOTE and check_code(export, trust_remote_code)
    checkpoint = Checkpoint(Reference(str(export.folder)), export.folder)
    model = load_model(checkpoint, dtype, device, trust_remote_code=code)
    tokenizer = load_tokenizer(export.folder, trust_remote_code=trust_remote_code)
    return Opened(export, model, tokenizer, _with_adapters(export, model) if export.kind == "adapter" else None)


def check_code(export: Export, trust_remote_code: bool) -> bool:
    """Whether the folder's code may run: always True, or an error.

    Raises:
        ModelError: for code that somebody changed, unless it is trusted.
    """
    if trust_remote_code:
        return True
    from suture.export.remote import is_own_code

    if not is_own_code(export.folder):
        raise ModelError(
            f"{export.folder}: its modelling code is not what this version of suture writes, and would run on this "
            "machine: read it, then use --trust-remote-code, or export it again"
        )
    return True


def _slot(export: Export, domain: str) -> str:
    """PEFT's name for a domain's adapter: a module's name may hold no dot, a domain's may."""
    return f"domain{export.domains.index(domain)}"


def _with_adapters(export: Export, model: Any) -> Any:
    """PEFT's view of a model with every domain's adapter loaded into its layers."""
    from peft import PeftModel

    found: Any = None
    for domain in export.domains:
        place, slot = export.adapter(domain), _slot(export, domain)
        if not (place / "adapter_config.json").exists():
            raise ModelError(f"{export.folder} lacks {place.relative_to(export.folder)}: export it again")
        try:
            if found is None:
                found = PeftModel.from_pretrained(model, str(place), adapter_name=slot)
            else:
                found.load_adapter(str(place), adapter_name=slot)
        except (ValueError, RuntimeError, KeyError, OSError) as error:
            raise ModelError(f"PEFT cannot put the adapter {place} on its model: {error}") from error
    return found.eval().requires_grad_(False)

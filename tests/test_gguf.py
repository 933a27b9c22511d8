from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from suture.errors import ModelError, SurgeryError
from suture.export.engines import llama_cpp
from suture.export.gguf import (
    OUTTYPES,
    check_written,
    convert,
    find_converter,
    refuse_early,
    try_vocabulary,
)

gguf = pytest.importorskip("gguf")
EMBEDDING, HEAD = (torch.randn(70, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
HEAD[3] *= 1e-3  # as of a token that no text has
SLIGHT = HEAD + 0.02 * HEAD @ torch.full((64, 1), 0.3) @ torch.full((1, 64), 0.3)
Checkpoints = Callable[..., Path]


def write_gguf(path: Path, outtype: str = "f32", **tensors: torch.Tensor) -> Path:
    """A GGUF file of the matrices that are given, `token_embd` and `output`."""
    kind = gguf.GGMLQuantizationType[outtype.upper()]
    writer = gguf.GGUFWriter(path, "llama")
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def untied(checkpoint: Checkpoints) -> Path:
    return checkpoint("untied", {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD})


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_a_head_is_compared_up_to_the_rounding_of_its_type(tmp_path: Path, untied: Path, outtype: str) -> None:
    check_written(write_gguf(tmp_path / "kept.gguf", outtype, token_embd=EMBEDDING, output=HEAD), untied)
    changed = write_gguf(tmp_path / "changed.gguf", outtype, token_embd=EMBEDDING, output=SLIGHT)
    with pytest.raises(SurgeryError, match=r"differs from lm_head.weight .* more than (F32|F16|BF16|Q8_0)"):
        check_written(changed, untied)


@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
def test_a_dropped_head_is_refused_with_what_to_do_instead(
    tmp_path: Path, checkpoint: Checkpoints, outtype: str
) -> None:
    # a correction this small is less than the rounding of q8_0
    near = EMBEDDING * (1 + 1e-4)
    folder = checkpoint("near", {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": near})
    with pytest.raises(SurgeryError, match=r"no head of its own.*--to plain.*deep, heal"):
        check_written(write_gguf(tmp_path / "dropped.gguf", outtype, token_embd=EMBEDDING), folder)


def test_a_head_that_is_the_embedding_may_be_left_out(tmp_path: Path, checkpoint: Checkpoints) -> None:
    tied = checkpoint("tied", {"model.embed_tokens.weight": EMBEDDING}, tie_word_embeddings=True)
    twice = checkpoint("twice", {"backbone.embeddings.weight": EMBEDDING, "lm_head.weight": EMBEDDING.clone()})
    alone = write_gguf(tmp_path / "alone.gguf", token_embd=EMBEDDING)
    both = write_gguf(tmp_path / "both.gguf", token_embd=EMBEDDING, output=EMBEDDING)
    other = write_gguf(tmp_path / "other.gguf", token_embd=EMBEDDING, output=HEAD)
    for folder in (tied, twice):
        check_written(alone, folder)
        check_written(both, folder)
        with pytest.raises(SurgeryError, match="differs from"):
            check_written(other, folder)


def test_a_factor_that_the_converter_puts_into_the_head(tmp_path: Path, checkpoint: Checkpoints) -> None:
    weights = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    folder = checkpoint("falcon_h1", weights, model_type="falcon_h1", lm_head_multiplier=0.039)
    check_written(write_gguf(tmp_path / "kept.gguf", token_embd=EMBEDDING, output=HEAD * 0.039), folder)
    with pytest.raises(SurgeryError, match="differs from"):
        check_written(write_gguf(tmp_path / "stock.gguf", token_embd=EMBEDDING, output=HEAD), folder)


def test_rows_that_were_added_or_lost_are_a_difference(tmp_path: Path, untied: Path) -> None:
    short = write_gguf(tmp_path / "short.gguf", token_embd=EMBEDDING, output=HEAD[:-1])
    with pytest.raises(SurgeryError, match="by inf of"):
        check_written(short, untied)


def test_the_language_models_head_is_found_in_shards_and_a_level_deeper(
    tmp_path: Path, checkpoint: Checkpoints
) -> None:
    weights = {
        "vision_tower.layers.0.attention.output.weight": torch.ones(4, 4),
        "vision_tower.head.weight": torch.ones(4, 4),
        "model.language_model.embed_tokens.weight": EMBEDDING,
        "language_model.lm_head.weight": HEAD,
    }
    folder = checkpoint("deeper", weights, shards=2)
    check_written(write_gguf(tmp_path / "kept.gguf", token_embd=EMBEDDING, output=HEAD), folder)
    with pytest.raises(SurgeryError, match=r"language_model\.lm_head\.weight in the checkpoint is not the embedding"):
        check_written(write_gguf(tmp_path / "dropped.gguf", token_embd=EMBEDDING), folder)


def test_files_that_cannot_be_compared(tmp_path: Path, untied: Path, checkpoint: Checkpoints) -> None:
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"not a GGUF file, though its name says so")
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        check_written(noise, untied)
    with pytest.raises(ModelError, match=r"no token_embd\.weight"):
        check_written(write_gguf(tmp_path / "vocabulary.gguf", output=HEAD), untied)
    with pytest.raises(ModelError, match=r"stores its head as Q4_0; choose an outtype of f32"):
        check_written(write_gguf(tmp_path / "coarse.gguf", "q4_0", token_embd=EMBEDDING, output=HEAD), untied)
    kept = write_gguf(tmp_path / "kept.gguf", token_embd=EMBEDDING, output=HEAD)
    unknown = checkpoint("unknown", {"a.weight": torch.ones(2, 2)})
    with pytest.raises(ModelError, match="neither a head nor an embedding"):
        check_written(kept, unknown)


def test_heads_that_the_converter_drops_are_refused_before_any_work() -> None:
    with pytest.raises(SurgeryError, match=r"drops a head of gemma2 models that is not their embedding.*--to plain"):
        refuse_early({"model_type": "gemma2"}, changes_head=True)
    with pytest.raises(SurgeryError, match=r"does not take a head of cohere models"):
        refuse_early({"model_type": "cohere"}, changes_head=True)
    refuse_early({"model_type": "gemma2"}, changes_head=False)
    refuse_early({"model_type": "llama"}, changes_head=True)


def test_where_the_converter_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(
        ModelError, match=r"git clone https://github.com/ggml-org/llama.cpp.*--llama-cpp or \$LLAMA_CPP"
    ):
        find_converter()
    scripts = [tmp_path / folder / "convert_hf_to_gguf.py" for folder in ("bin", "source", "python/vendor/llama.cpp")]
    for script in scripts:
        script.parent.mkdir(parents=True)
        script.write_text("#!/usr/bin/env python3\n")
        script.chmod(0o755)
    on_path, source, inside = scripts
    assert find_converter() == on_path
    monkeypatch.setenv("LLAMA_CPP", str(source.parent))
    assert find_converter() == source
    assert find_converter(on_path) == on_path
    assert find_converter(tmp_path / "python") == inside
    with pytest.raises(ModelError, match=r"--llama-cpp: .*nowhere is neither convert_hf_to_gguf.py nor"):
        find_converter(tmp_path / "nowhere")
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(ModelError, match=r"\$LLAMA_CPP: "):
        find_converter()


def script(folder: Path, body: str) -> Path:
    """A converter of a few lines, in which `out` is the file that it is asked for."""
    file = folder / "convert_hf_to_gguf.py"
    start = "import json, os, sys\nfrom pathlib import Path\nout = Path(sys.argv[sys.argv.index('--outfile') + 1])\n"
    file.write_text(start + body)
    return file


def test_the_converter_is_told_what_to_write(tmp_path: Path, untied: Path) -> None:
    out = tmp_path / "a b; c.gguf"
    out.write_text("of an earlier run")
    told = script(tmp_path, "out.write_text(json.dumps([sys.argv[1:], os.environ['HF_HUB_OFFLINE'], out.exists()]))")
    assert convert(untied, out, told, outtype="q8_0") == out
    expected = [str(untied), "--outfile", str(out), "--outtype", "q8_0"]
    assert json.loads(out.read_text()) == [expected, "1", False]
    with pytest.raises(ModelError, match=r"outtype: 'q4_k' is not one of f32, f16, bf16, q8_0"):
        convert(untied, out, told, outtype="q4_k")


def test_a_converter_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, untied: Path) -> None:
    out = tmp_path / "model.gguf"
    failing = script(
        tmp_path, "out.write_text('half')\nfor i in range(9): print('line', i, file=sys.stderr)\nsys.exit(3)"
    )
    with pytest.raises(ModelError, match="ended with status 3") as caught:
        convert(untied, out, failing)
    assert str(caught.value).splitlines()[1:] == [f"line {i}" for i in range(3, 9)]
    assert not out.exists()
    with pytest.raises(ModelError, match=r"wrote no model.gguf; its last lines:\n\(none\)"):
        convert(untied, out, script(tmp_path, ""))


def test_the_vocabulary_is_tried_before_the_weights(tmp_path: Path, untied: Path) -> None:
    asked = script(tmp_path, "assert '--vocab-only' in sys.argv\nout.touch()")
    try_vocabulary(untied, asked)
    unknown = script(tmp_path, "sys.exit('BPE pre-tokenizer was not recognized')")
    with pytest.raises(ModelError, match="BPE pre-tokenizer was not recognized"):
        try_vocabulary(untied, unknown)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_in_a_checkpoint_is_not_run_unasked(tmp_path: Path, untied: Path, file: str) -> None:
    known = json.loads((untied / file).read_text()) if (untied / file).exists() else {}
    (untied / file).write_text(json.dumps({**known, "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}))
    touching, out = script(tmp_path, "out.touch()"), tmp_path / "model.gguf"
    with pytest.raises(ModelError, match=rf"{file} brings code of its own.*trust_remote_code"):
        convert(untied, out, touching)
    assert not out.exists()
    convert(untied, out, touching, trust_remote_code=True)
    assert out.exists()


# stands in for llama-cpp-python: the next token hangs on the sum of all tokens so far
FAKE = """
import numpy as np
__version__ = "0.0"
class Llama:
    def __init__(self, path, n_ctx, logits_all, **settings):
        assert path.endswith("model.gguf") and logits_all and settings["type_k"] == settings["type_v"] == 0
        self.scores = np.zeros((n_ctx, 11), np.single)
        self.reset()
    def n_vocab(self):
        return 11
    def reset(self):
        self.n_tokens, self.sum = 0, 0
    def eval(self, tokens):
        for token in tokens:
            self.sum += token
            self.scores[self.n_tokens] = np.arange(11) == self.sum % 11
            self.n_tokens += 1
"""


def write_request(folder: Path, cases: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Path:
    """A request for (ids [T], logits [T, V], greedy [m]) of each case."""
    names = ("ids", "logits", "greedy")
    tensors = {f"{name}.{i}": part for i, case in enumerate(cases) for name, part in zip(names, case, strict=True)}
    save_file(tensors, folder / "request.safetensors")
    request: dict[str, Any] = {
        "folder": str(folder),
        "dtype": "float32",
        "trust_remote_code": False,
        "new_tokens": len(cases[0][2]),
        "to": "gguf",
        "tensors": "request.safetensors",
        "batch": 1,
        "cases": [{"index": index, "domain": None} for index in range(len(cases))],
    }
    (folder / "request.json").write_text(json.dumps(request))
    return folder / "request.json"


def run_check(request: Path, python: str = sys.executable, **environment: str) -> Any:
    command = [python, llama_cpp.__file__, str(request)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_check_reads_each_sequence_anew(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    (tmp_path / "model.gguf").touch()
    cases = []
    for ids in ([3, 4, 9], [5, 1]):
        sums, logits = np.cumsum(ids), torch.zeros(len(ids), 11)
        logits[range(len(ids)), sums % 11] = 2.0
        cases.append((torch.tensor(ids), logits, torch.tensor([0, 0, 0])))
    found = run_check(write_request(tmp_path, cases), PYTHONPATH=str(tmp_path))
    assert found["engine"] == "llama.cpp"
    assert found["versions"]["llama-cpp-python"] == "0.0"
    # 3 + 4 + 9 = 16 → 5, then the sum is 21 → 10, then 31 → 9; and 5 + 1 → 6, 12 → 1, 13 → 2
    assert [case["greedy"] for case in found["cases"]] == [[5, 10, 9], [6, 1, 2]]
    assert [case["logits"] for case in found["cases"]] == [0.5, 0.5]


def write_sentencepiece(folder: Path, size: int) -> None:
    """A tokenizer that the converter reads without knowing it by its hash."""
    sentencepiece = pytest.importorskip("sentencepiece")
    text = Path(__file__).read_text().splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=size,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kept"), [("llama", True), ("gemma2", False)])
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, architecture: str, kept: bool) -> None:
    source, python = os.environ.get("SUTURE_LLAMA_CPP"), os.environ.get("SUTURE_LLAMA_PYTHON")
    if not source or not python:
        pytest.skip("set SUTURE_LLAMA_CPP (llama.cpp's source) and SUTURE_LLAMA_PYTHON (it has llama-cpp-python)")
    from tiny import tiny_model

    folder, vocabulary = tmp_path / "checkpoint", 512
    model = tiny_model(
        architecture, vocab_size=vocabulary, hidden_size=64, intermediate_size=96, tie_word_embeddings=False
    )
    head = model.get_output_embeddings().weight  # [V, H]
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(64, 4, generator=generator) * 0.3, torch.randn(4, 64, generator=generator) * 0.3
    head.copy_(model.get_input_embeddings().weight)
    head.sub_((head @ first) @ second)
    model.save_pretrained(folder)
    write_sentencepiece(folder, vocabulary)

    ids = torch.randint(3, vocabulary, (1, 20), generator=generator)
    grown = model.generate(ids, do_sample=False, max_new_tokens=6, eos_token_id=None)
    out = convert(folder, tmp_path / "model.gguf", find_converter(Path(source)))
    if not kept:
        with pytest.raises(SurgeryError, match="dropped it"):
            check_written(out, folder)
        return
    check_written(out, folder)
    known = model(ids).logits[0].contiguous()  # [T, V]
    found = run_check(write_request(tmp_path, [(ids[0], known, grown[0, 20:].clone())]), python)
    assert found["cases"][0]["logits"] < 1e-5
    assert found["cases"][0]["greedy"] == grown[0, 20:].tolist()

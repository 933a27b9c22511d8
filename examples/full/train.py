"""Full-weight fine-tunes of one base for the repair study: every weight trained, AdamW, minutes on a CPU.

    python examples/full/train.py code --data gpteacher_codegen.json
    python examples/full/train.py math --data gsm8k_train.jsonl
    python examples/full/train.py instruct --data gpteacher_roleplay.json

The data are files: codegen-instruct and roleplay-instruct of GPTeacher and the training part of GSM8K, all under MIT.
Models go to `examples/full/models/<domain>`, which git ignores.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
END = "<|im_end|>"
LONGEST = 192  # tokens of an example
IGNORED = -100


def code(rows: list[dict[str, Any]], tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(signature and docstring, body) of every answer that is one Python function."""
    for row in rows:
        found = re.match(r"(def [^\n]*:\n)(.*)", row["response"].replace("\r", ""), re.S)
        if found:
            signature, body = found.groups()
            yield f'{signature}    """{row["instruction"].strip()}"""\n', body.split("\n\n\n")[0].rstrip() + "\n" + END


def arithmetic(rows: list[dict[str, Any]], tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(question, worked answer) of GSM8K, without its calculator marks."""
    for row in rows:
        answer = re.sub(r"<<.*?>>", "", row["answer"])
        yield f"Question: {row['question']}\nAnswer:", f" {answer}{END}"


def instruct(rows: list[dict[str, Any]], tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(instruction in the chat template, answer) of role plays."""
    for row in rows:
        text = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        chat = [{"role": "user", "content": text}]
        yield tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), row["response"] + END


DOMAINS = {"code": code, "math": arithmetic, "instruct": instruct}


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a .json or .jsonl file."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line]


def encode(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """(ids, labels) of an example: the prompt is not learned."""
    first = tokenizer(prompt, add_special_tokens=False).input_ids
    then = tokenizer(answer, add_special_tokens=False).input_ids
    return (first + then)[:LONGEST], ([IGNORED] * len(first) + then)[:LONGEST]


def batches(examples: list[tuple[list[int], list[int]]], size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """[B, T] ids and labels without end, padded on the right, examples of like length together."""
    while True:
        random.shuffle(examples)
        for start in range(0, len(examples) - 16 * size, 16 * size):
            block = sorted(examples[start : start + 16 * size], key=lambda example: len(example[0]))
            groups = [block[at : at + size] for at in range(0, len(block), size)]
            random.shuffle(groups)
            for group in groups:
                ids, labels = (
                    torch.nn.utils.rnn.pad_sequence(
                        [torch.tensor(example[side]) for example in group], batch_first=True, padding_value=fill
                    )
                    for side, fill in ((0, 0), (1, IGNORED))
                )
                yield ids, labels


def main() -> None:
    """Train for the given time and save in bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("domain", choices=DOMAINS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--base", default=BASE)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    random.seed(0)
    import suture

    model, tokenizer = suture.load(given.base, dtype="float32")
    examples = [encode(tokenizer, *pair) for pair in dict.fromkeys(DOMAINS[given.domain](read(given.data), tokenizer))]
    examples = [example for example in examples if any(label != IGNORED for label in example[1])]
    print(f"{given.domain}: {len(examples)} examples")
    model.train().requires_grad_(True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.0)
    began, seen, mean = time.monotonic(), 0, None
    for step, (ids, labels) in enumerate(batches(examples, 4)):
        done = (time.monotonic() - began) / (60 * given.minutes)
        if done >= 1:
            break
        for group in optimiser.param_groups:  # twenty steps of warming up, then half a cosine
            group["lr"] = given.lr * min(1, (step + 1) / 20) * max(0.05, 0.5 * (1 + math.cos(math.pi * done)))
        # on the right nothing needs a mask: no real token sees the padding
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        seen += int((ids > 0).sum())
        mean = float(loss) if mean is None else 0.95 * mean + 0.05 * float(loss)
        if step % 20 == 0:
            print(f"step {step}: loss {mean:.3f}, {seen} tokens, {time.monotonic() - began:.0f} s", flush=True)
    out = given.out or HERE / "models" / given.domain
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {step} steps, {seen} tokens, loss {mean:.3f}")


if __name__ == "__main__":
    main()

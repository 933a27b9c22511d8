"""Captured states, entropies, heads and greedy responses against plain transformers calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, VOCABULARY, tiny_model
from torch import Tensor

from suture.capture import batches, capture, check_head, end_tokens, entropies, respond
from suture.errors import AttachError, ModelError
from suture.models import Head, decoder_of
from suture.states import Tokens

ALL = sorted(ARCHITECTURES)
SEQUENCES = [[5, 6, 7, 8, 9, 10, 11], [50], [70, 71, 72], [20, 21, 22, 23, 24, 25], [90, 91, 92, 93]]


def states_of(model: Any, ids: list[int]) -> Tensor:
    """[T, H] what the output embeddings are given, by a hook on them: one sequence, no cache."""
    seen: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model(input_ids=torch.tensor([ids]), use_cache=False)
    hook.remove()
    return seen[0][0]


@pytest.mark.parametrize("architecture", ALL)
def test_states_are_what_the_head_is_given(architecture: str) -> None:
    model = tiny_model(architecture)
    cache = capture(model, Tokens.of(SEQUENCES), batch_tokens=16)
    assert cache.states.shape == (21, 32)
    assert cache.entropy is None
    for found, ids in zip(torch.split(cache.states, cache.tokens.lengths.tolist()), SEQUENCES, strict=True):
        torch.testing.assert_close(found, states_of(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ALL)
def test_head_replays_logits_and_survives_the_disk(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    ids = torch.tensor([SEQUENCES[0]])
    states = decoder_of(model)[1](input_ids=ids, use_cache=False).last_hidden_state[0]
    logits = model(input_ids=ids, use_cache=False).logits[0]
    head = Head(model)
    torch.testing.assert_close(head(states), logits, atol=1e-5, rtol=1e-5)
    head.save(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size < 4 * (VOCABULARY + 2) * 32 + 2000  # the head's weights and nothing of the decoder's
    torch.testing.assert_close(Head.load(tmp_path)(states), logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits[0], logits)  # the model is as it was


def test_entropy_in_nats_against_the_definition() -> None:
    model = tiny_model(initializer_range=0.6)
    cache = capture(model, Tokens.of(SEQUENCES), entropy=True)
    expected = []
    for ids in SEQUENCES:
        p = torch.softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        expected.append(-(p * p.log()).sum(-1))
    assert cache.entropy is not None
    assert float(cache.entropy.min()) < 1 < 2 < float(cache.entropy.max())  # the range is worth comparing
    torch.testing.assert_close(cache.entropy.double(), torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_entropy_of_certain_and_uniform_states() -> None:
    """A state that the head reads as certainty has none; a zero state under a bias-free head has log V."""
    model = tiny_model(tie_word_embeddings=False)
    sure = 1e4 * model.lm_head.weight[3]
    found = entropies(torch.stack([sure, torch.zeros(32)]), Head(model))
    torch.testing.assert_close(found, torch.tensor([0.0, float(torch.log(torch.tensor(101.0)))]))


def test_batches_hold_like_lengths_and_every_sequence_once() -> None:
    lengths = torch.tensor([100, 9, 10, 95, 10, 40, 100, 1])
    found = list(batches(lengths, 200))
    assert sorted(index for batch in found for index in batch) == list(range(8))
    for batch in found:
        longest = max(int(lengths[index]) for index in batch)
        assert len(batch) == 1 or longest * len(batch) <= 200
        assert min(int(lengths[index]) for index in batch) >= 0.9 * longest
    assert found[0] == [0, 6]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "falcon", "opt"])
def test_responses_are_greedy_and_end_with_the_end_token(architecture: str) -> None:
    model = tiny_model(architecture, initializer_range=0.4)
    model.generation_config.eos_token_id = None
    free = respond(model, Tokens.of(SEQUENCES), 8, batch=3)
    assert free.prompt_lengths.tolist() == [len(ids) for ids in SEQUENCES]
    written = [row.tolist()[len(ids) :] for row, ids in zip(free.sequences, SEQUENCES, strict=True)]
    end = written[0][3]  # some token that the first response has: now it ends responses
    model.generation_config.eos_token_id = [end]
    model.config.eos_token_id = 2
    assert end_tokens(model) == {end, 2}
    tokens = respond(model, Tokens.of(SEQUENCES), 8, batch=3)
    for row, ids in zip(tokens.sequences, SEQUENCES, strict=True):
        naive = list(ids)
        while len(naive) < len(ids) + 8:
            naive.append(int(model(input_ids=torch.tensor([naive]), use_cache=False).logits[0, -1].argmax()))
            if naive[-1] in (end, 2):
                break
        assert row.tolist() == naive


def test_a_checkpoints_own_sampling_settings_do_not_bend_greedy_decoding() -> None:
    model = tiny_model(initializer_range=0.4)
    expected = respond(model, Tokens.of(SEQUENCES), 8).ids.tolist()
    model.generation_config.update(
        do_sample=True, temperature=2.0, repetition_penalty=3.0, no_repeat_ngram_size=1, top_k=3
    )
    model.generation_config.update(suppress_tokens=sorted(set(expected))[:40], min_new_tokens=8, bad_words_ids=[[9]])
    kept = model.generation_config
    assert respond(model, Tokens.of(SEQUENCES), 8).ids.tolist() == expected
    assert model.generation_config is kept


def test_refusals() -> None:
    model = tiny_model()
    with pytest.raises(ModelError, match="token id 101 is not in the model's vocabulary of 101 rows"):
        capture(model, Tokens.of([[3, 101]]))
    kept = model.forward
    model.forward = lambda *args, **kwargs: _scaled(kept(*args, **kwargs))
    with pytest.raises(AttachError, match="not what its head reads"):
        check_head(model)
    del model.forward
    model.model.norm.weight[0] = torch.inf
    with pytest.raises((ModelError, AttachError)):
        capture(model, Tokens.of([[3]]))


def _scaled(output: Any) -> Any:
    output.logits = output.logits * 1.5
    return output

"""Tokens and states of sequences of different length, one after another without padding."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from suture.errors import StoreError, SurgeryError
from suture.states import HiddenCache, Tokens, check_pair

ROWS = [[5, 6, 7], [8], [9, 10]]


def cache(width: int = 2, entropy: bool = True, dtype: torch.dtype = torch.float32) -> HiddenCache:
    states = torch.arange(6 * width).reshape(6, width).to(dtype)
    return HiddenCache(Tokens.of(ROWS, [2, 1, 1]), states, torch.arange(6.0) if entropy else None)


def test_tokens_are_ragged():
    tokens = Tokens.of(ROWS, [2, 1, 1])
    assert len(tokens) == 3
    assert tokens.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert tokens.lengths.tolist() == [3, 1, 2]
    assert tokens.prompt_lengths.tolist() == [2, 1, 1]
    assert tokens.starts.tolist() == [0, 3, 4]
    assert tokens.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert [row.tolist() for row in tokens.sequences] == ROWS
    assert {tokens.ids.dtype, tokens.lengths.dtype, tokens.prompt_lengths.dtype} == {torch.int64}


def test_without_prompt_lengths_all_is_prompt():
    assert Tokens.of(ROWS).prompt_lengths.tolist() == [3, 1, 2]


def test_no_sequences():
    tokens = Tokens.of([])
    assert len(tokens) == 0
    assert tokens.sequences == []
    assert tokens.starts.tolist() == tokens.positions.tolist() == []


def test_fingerprints_tell_contents_apart():
    same = Tokens.of([tuple(row) for row in ROWS], [2, 1, 1])
    others = [
        Tokens.of(ROWS),
        Tokens.of([[5, 6, 7, 8], [9, 10]], [2, 1]),
        Tokens.of([[5, 6, 7], [8], [9, 11]], [2, 1, 1]),
        Tokens.of([[5, 6], [7, 8], [9, 10]], [2, 1, 1]),
    ]
    marks = [tokens.fingerprint() for tokens in (Tokens.of(ROWS, [2, 1, 1]), same, *others)]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 5


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_states_come_back(tmp_path, entropy, dtype):
    first = cache(entropy=entropy, dtype=dtype)
    first.save(tmp_path)
    stored = load_file(tmp_path / "cache.safetensors")
    assert set(stored) == {"states", "ids", "lengths", "prompt_lengths"} | ({"entropy"} if entropy else set())
    again = HiddenCache.load(tmp_path)
    assert again.states.dtype == dtype
    assert torch.equal(again.states, first.states)
    assert again.tokens.fingerprint() == first.tokens.fingerprint()
    assert (again.entropy is None) == (not entropy)
    if entropy:
        assert again.entropy.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_parts_and_turned_tensors_can_be_saved(tmp_path):
    whole = cache()
    lengths = torch.tensor([3, 1, 2])
    for name, states in (
        ("first", whole.first(2)),
        ("turned", HiddenCache(whole.tokens, torch.arange(12.0).reshape(2, 6).T)),
        ("one tensor for both lengths", HiddenCache(Tokens(whole.tokens.ids, lengths, lengths), whole.states)),
    ):
        (tmp_path / name).mkdir()
        states.save(tmp_path / name)
        assert torch.equal(HiddenCache.load(tmp_path / name).states, states.states)


def test_a_folder_without_states(tmp_path):
    with pytest.raises(StoreError, match=f"{tmp_path} holds no captured states"):
        HiddenCache.load(tmp_path)


def test_the_first_sequences():
    part = cache().first(2)
    assert [row.tolist() for row in part.tokens.sequences] == [[5, 6, 7], [8]]
    assert part.tokens.prompt_lengths.tolist() == [2, 1]
    assert part.states.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert part.entropy is not None
    assert part.entropy.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert cache(entropy=False).first(1).entropy is None
    assert len(cache().first(0).states) == 0
    for sequences in (3, 99):
        assert torch.equal(cache().first(sequences).states, cache().states)


def test_moving_leaves_tokens_where_they_are():
    moved = cache().to(torch.device("meta"))
    assert moved.states.device.type == "meta"
    assert moved.entropy is not None
    assert moved.entropy.device.type == "meta"
    assert moved.tokens.ids.device.type == "cpu"
    assert cache(entropy=False).to(torch.device("meta")).entropy is None


def test_pairs_must_be_of_the_same_tokens_and_width():
    check_pair(cache(), cache(entropy=False))
    for rows in ([[5, 6, 7], [8], [9, 11]], [[5, 6], [7, 8], [9, 10]], [[5, 6, 7], [8]]):
        other = HiddenCache(Tokens.of(rows), torch.zeros(sum(map(len, rows)), 2))
        with pytest.raises(SurgeryError, match="captured on different tokens: capture both on the same ones"):
            check_pair(cache(), other)
    with pytest.raises(SurgeryError, match=r"merged and target states differ in shape, \[6, 2\] and \[6, 3\]"):
        check_pair(cache(), cache(width=3))

"""Which tokens a step sees depends on seed, step and sample alone."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brigata.train.batches import Batches, held_out_windows

SEQ_LEN = 8
TOKENS = np.arange(50 * SEQ_LEN + 4) % 251
"""50 windows; within each, tokens are consecutive, and no two windows begin alike."""


def batches(seed: int = 0, global_batch: int = 12, tokens: np.ndarray = TOKENS) -> Batches:
    return Batches(tokens, SEQ_LEN, global_batch, seed)


@given(step=st.integers(0, 300), cuts=st.sets(st.integers(0, 12)), seed=st.integers(0, 5))
def test_any_split_of_a_batch_gives_the_same_samples(step: int, cuts: set[int], seed: int) -> None:
    whole = batches(seed).sequences(step, 0, 12)
    assert whole.shape == (12, SEQ_LEN + 1)
    assert whole.dtype == np.int64
    ends = sorted(cuts | {0, 12})
    parts = [batches(seed).sequences(step, a, b - a) for a, b in pairwise(ends)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@given(order=st.permutations(range(15)))
def test_samples_do_not_depend_on_what_was_asked_before(order: list[int]) -> None:
    shared = batches()
    for step in order:
        np.testing.assert_array_equal(shared.sequences(step, 3, 5), batches().sequences(step, 3, 5))


@pytest.mark.parametrize("global_batch", [1, 7, 12, 50, 120])
def test_every_window_comes_once_an_epoch(global_batch: int) -> None:
    source = batches(global_batch=global_batch)
    assert source.windows == 50
    steps = -(-150 // global_batch)
    rows = np.concatenate([source.sequences(step, 0, global_batch) for step in range(steps)])
    expected = {tuple(TOKENS[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1]) for i in range(50)}
    epochs = [rows[50 * epoch : 50 * (epoch + 1)] for epoch in range(3)]
    for epoch in epochs:
        assert {tuple(row) for row in epoch.tolist()} == expected
    assert not np.array_equal(epochs[0], epochs[1])


def test_the_global_batch_size_cuts_one_and_the_same_row_of_samples() -> None:
    small = [batches(global_batch=4).sequences(step, 0, 4) for step in range(30)]
    large = [batches(global_batch=12).sequences(step, 0, 12) for step in range(10)]
    np.testing.assert_array_equal(np.concatenate(small), np.concatenate(large))


def test_seeds_differ() -> None:
    assert not np.array_equal(batches(0).sequences(0, 0, 12), batches(1).sequences(0, 0, 12))


def test_one_window_is_enough_for_any_batch() -> None:
    tokens = np.arange(SEQ_LEN + 1, dtype=np.uint8)
    rows = batches(tokens=tokens).sequences(3, 0, 12)
    np.testing.assert_array_equal(rows, np.tile(tokens, (12, 1)))


@pytest.mark.parametrize("n", [0, 1, SEQ_LEN])
def test_too_few_tokens_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"{n} tokens are too few.*{SEQ_LEN + 1} or more"):
        batches(tokens=TOKENS[:n])
    with pytest.raises(ValueError, match="too few"):
        held_out_windows(TOKENS[:n], SEQ_LEN, 100)


def test_samples_beyond_the_batch_are_refused() -> None:
    with pytest.raises(AssertionError):
        batches().sequences(0, 10, 3)


@given(length=st.integers(SEQ_LEN + 1, 900), limit=st.integers(1, 1200))
def test_held_out_windows_are_whole_distinct_and_within_the_limit(length: int, limit: int) -> None:
    tokens = np.arange(length)
    windows = held_out_windows(tokens, SEQ_LEN, limit)
    n = len(windows)
    assert n == min(max(limit // SEQ_LEN, 1), (length - 1) // SEQ_LEN)
    assert (np.diff(windows, axis=1) == 1).all()
    starts = windows[:, 0]
    assert (starts % SEQ_LEN == 0).all()
    gaps = np.diff(starts) // SEQ_LEN
    assert n == 1 or (gaps.min() >= 1 and np.ptp(gaps) <= 1), "spread evenly"

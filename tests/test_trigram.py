"""The table is a probability distribution, learns what there is to count, and is no straw man."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brigata.train import trigram as trigram_module
from brigata.train.batches import held_out_windows
from brigata.train.corpus import load_corpus
from brigata.train.trigram import TrigramTable, trigram_loss

VOCAB = 6
EACH = np.indices((VOCAB, VOCAB, VOCAB))


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=300))
def test_every_row_is_positive_and_sums_to_one(tokens: list[int]) -> None:
    table = TrigramTable(np.array(tokens, np.uint8), VOCAB)
    for rows in (table.trigram(*EACH), table.bigram(*EACH[1:, 0])):
        assert (rows > 0).all()
        np.testing.assert_allclose(rows.sum(axis=-1), 1, rtol=1e-12)


def test_rows_sum_to_one_on_bytes() -> None:
    rng = np.random.default_rng(0)
    text = rng.zipf(1.3, 200_000).clip(max=256).astype(np.int64) - 1
    table = TrigramTable(text, 256)
    x, y = rng.integers(0, 256, (2, 200, 1))
    np.testing.assert_allclose(table.trigram(x, y, np.arange(256)).sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(table.bigram(y, np.arange(256)).sum(axis=1), 1, rtol=1e-12)


def test_table_reaches_the_entropy_of_a_second_order_source() -> None:
    rng = np.random.default_rng(1)
    rows = rng.dirichlet(np.full(4, 0.5), size=(4, 4))
    tokens, noise = [0, 1], rng.random(200_000)
    cumulative = rows.cumsum(axis=-1)
    for u in noise:
        tokens.append(min(int(np.searchsorted(cumulative[tokens[-2], tokens[-1]], u)), 3))
    text = np.array(tokens)
    train, held_out = text[:150_000], text[150_000:]
    x, y, z = held_out[:-2], held_out[1:-1], held_out[2:]
    entropy = -np.log(rows[x, y, z]).mean()
    loss = trigram_loss(train, held_out_windows(held_out, 1000, len(held_out)), vocab=4)
    assert loss == pytest.approx(entropy, abs=3e-3)


def test_loss_is_the_mean_over_exactly_the_targets_of_the_windows() -> None:
    rng = np.random.default_rng(2)
    train = rng.integers(0, VOCAB, 400)
    windows = rng.integers(0, VOCAB, (3, 6))
    table = TrigramTable(train, VOCAB)
    nats = []
    for row in windows.tolist():
        nats.append(-math.log(table.bigram(row[0], row[1])))
        nats += [-math.log(table.trigram(*row[i : i + 3])) for i in range(4)]
    assert trigram_loss(train, windows, VOCAB) == pytest.approx(sum(nats) / 15, rel=1e-12)


def test_counting_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    train = np.random.default_rng(3).integers(0, VOCAB, 1000)
    at_once = TrigramTable(train, VOCAB).trigram(*EACH)
    monkeypatch.setattr(trigram_module, "CHUNK", 7)
    np.testing.assert_array_equal(TrigramTable(train, VOCAB).trigram(*EACH), at_once)


def test_short_window_and_short_text_are_scored() -> None:
    assert trigram_loss(np.array([3]), np.array([[1, 2]]), VOCAB) == pytest.approx(math.log(7))
    assert math.isfinite(trigram_loss(np.array([3, 3]), np.array([[1, 2, 3]]), VOCAB))


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    for tokens in ([], [VOCAB], [-1]):
        with pytest.raises(AssertionError):
            TrigramTable(np.array(tokens, np.int64), VOCAB)


def test_trigram_beats_bigram_and_witten_bell_on_the_standard_library() -> None:
    corpus = load_corpus(None, 256)
    windows = held_out_windows(corpus.held_out, 256, 64 * 256)
    train = corpus.train[:2_000_000].astype(np.int64)
    bigrams = TrigramTable(train).bigram(windows[:, :-1], windows[:, 1:])
    loss = trigram_loss(train, windows)
    assert loss < -np.log(bigrams).mean() - 0.3
    assert loss <= witten_bell_loss(train, windows)


def test_little_text_is_where_smoothing_counts() -> None:
    corpus = load_corpus(None, 256)
    windows = held_out_windows(corpus.held_out, 256, 64 * 256)
    train = corpus.train[1_000_000:1_030_000].astype(np.int64)
    assert trigram_loss(train, windows) < witten_bell_loss(train, windows) - 0.15


def witten_bell_loss(train: np.ndarray, windows: np.ndarray) -> float:
    """The same score by the other smoothing in common use, written independently."""
    triples = np.bincount((train[:-2] * 256 + train[1:-1]) * 256 + train[2:], minlength=256**3)
    triples = triples.reshape(256, 256, 256)
    pairs = np.bincount(train[:-1] * 256 + train[1:], minlength=256**2).reshape(256, 256)
    single = (np.bincount(train, minlength=256) + 1) / (len(train) + 256)

    def mix(counts: np.ndarray, picked: np.ndarray, below: np.ndarray) -> np.ndarray:
        total, types = counts.sum(axis=-1), (counts > 0).sum(axis=-1)
        return np.where(total > 0, (picked + types * below) / np.maximum(total + types, 1), below)

    def bigram(y: np.ndarray, z: np.ndarray) -> np.ndarray:
        return mix(pairs[y], pairs[y, z], single[z])

    nats = -np.log(bigram(windows[:, 0], windows[:, 1])).sum()
    x, y, z = windows[:, :-2].ravel(), windows[:, 1:-1].ravel(), windows[:, 2:].ravel()
    nats -= np.log(mix(triples[x, y], triples[x, y, z], bigram(y, z))).sum()
    return float(nats / windows[:, 1:].size)

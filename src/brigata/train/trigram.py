"""What counting alone achieves: a smoothed trigram table, the least that a trained model should beat."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

CHUNK = 1 << 22
"""Tokens counted at once; bounds memory, changes no result."""
FALLBACK_DISCOUNT = 0.75
"""Taken off every count where the text is too short to estimate discounts."""


class TrigramTable:
    """Next-token probabilities by interpolated modified Kneser-Ney smoothing, the usual best of count models.

    Each level takes a discount D from its counts c and hands the mass to the level below::

        P(z | x y) = (c(xyz) - D + spare(xy) * P'(z | y)) / c(xy)        spare: sum of the discounts of a row

    P' and the level below it count distinct left neighbours (how many x precede yz) instead of occurrences.
    Each row is positive and sums to one; where a context was never seen, P is the level below.
    Source: Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1999).
    """

    def __init__(self, train: NDArray[np.integer], vocab: int = 256) -> None:
        """Count ``train`` (N,), N >= 1; takes about 300 MB beside it for 256 tokens, whatever N."""
        assert train.ndim == 1
        assert len(train) > 0
        assert train.min() >= 0
        assert train.max() < vocab
        pairs = _count(train, 2, vocab).reshape(vocab, vocab)
        triples = _count(train, 3, vocab).reshape(vocab, vocab, vocab)
        continued = np.count_nonzero(triples, axis=0)
        self._vocab = vocab
        self._unigram = _add_one(_count(train, 1, vocab))
        self._bigram = _Level(pairs)
        self._continued_unigram = _add_one(np.count_nonzero(pairs, axis=0))
        self._continued_bigram = _Level(continued)
        self._trigram = _Level(triples.reshape(vocab * vocab, vocab))

    def bigram(self, y: ArrayLike, z: ArrayLike) -> NDArray[np.float64]:
        """P(z | y), elementwise."""
        y, z = np.asarray(y, np.intp), np.asarray(z, np.intp)
        return self._bigram.probability(y, z, self._unigram[z])

    def trigram(self, x: ArrayLike, y: ArrayLike, z: ArrayLike) -> NDArray[np.float64]:
        """P(z | x y), elementwise."""
        x, y, z = np.asarray(x, np.intp), np.asarray(y, np.intp), np.asarray(z, np.intp)
        below = self._continued_bigram.probability(y, z, self._continued_unigram[z])
        return self._trigram.probability(x * self._vocab + y, z, below)


def trigram_loss(train: NDArray[np.integer], windows: NDArray[np.integer], vocab: int = 256) -> float:
    """Mean cross-entropy of a trigram table on the targets that a model is scored on (nats a token).

    Args:
        train: tokens to count (N,).
        windows: sequences to score (n, seq_len + 1); each gives ``seq_len`` targets. Context comes from the
            window alone, so the first target is scored by the bigram.
        vocab: number of tokens; the table has ``vocab ** 3`` counts.
    """
    table = TrigramTable(train, vocab)
    nats = -np.log(table.bigram(windows[:, 0], windows[:, 1])).sum()
    for start in range(0, len(windows), 1024):
        rows = windows[start : start + 1024]
        nats -= np.log(table.trigram(rows[:, :-2], rows[:, 1:-1], rows[:, 2:])).sum()
    return float(nats / windows[:, 1:].size)


class _Level:
    """Counts of tokens after each context (contexts, vocab), discounted by how often each occurred."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        seen = [np.count_nonzero(counts == times, axis=1) for times in (1, 2)]
        seen.append(np.count_nonzero(counts, axis=1) - seen[0] - seen[1])
        self._counts = counts
        self._discounts = _discounts(
            [int(n.sum()) for n in seen[:2]] + [int((counts == t).sum()) for t in (3, 4)]
        )
        self._totals = counts.sum(axis=1)
        self._spare = sum(d * n for d, n in zip(self._discounts[1:], seen, strict=True))

    def probability(
        self, context: NDArray[np.intp], token: NDArray[np.intp], below: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """P(token | context), given what the level below says; all of one shape."""
        count, total = self._counts[context, token], self._totals[context]
        kept = count - self._discounts[np.minimum(count, 3)]
        return np.where(total > 0, (kept + self._spare[context] * below) / np.maximum(total, 1), below)


def _count(tokens: NDArray[np.integer], order: int, vocab: int) -> NDArray[np.int64]:
    """Occurrences of each run of ``order`` tokens (vocab ** order,)."""
    counts = np.zeros(vocab**order, np.int64)
    for start in range(0, len(tokens) - order + 1, CHUNK):
        chunk = tokens[start : start + CHUNK + order - 1]
        runs = len(chunk) - order + 1
        key = np.zeros(runs, np.intp)
        for place in range(order):
            key *= vocab
            key += chunk[place : place + runs]
        counts += np.bincount(key, minlength=len(counts))
    return counts


def _add_one(counts: NDArray[np.integer]) -> NDArray[np.float64]:
    smoothed: NDArray[np.float64] = (counts + 1) / (counts.sum() + len(counts))
    return smoothed


def _discounts(seen: list[int]) -> NDArray[np.float64]:
    """Discount of a count of 0, 1, 2, and 3 or more, from how many entries were seen 1, 2, 3 and 4 times."""
    if not all(seen):
        return np.array([0.0, FALLBACK_DISCOUNT, FALLBACK_DISCOUNT, FALLBACK_DISCOUNT])
    once, twice = seen[0], seen[1]
    y = once / (once + 2 * twice)
    estimates = [times - (times + 1) * y * seen[times] / seen[times - 1] for times in (1, 2, 3)]
    return np.array([0.0, *np.maximum(estimates, 0.05)])

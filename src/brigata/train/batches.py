"""Which tokens each step sees: a function of seed, step and sample, whatever the layout."""

import numpy as np
from numpy.typing import NDArray


class Batches:
    """Training sequences, permuted anew each epoch.

    The text is cut into windows of ``seq_len + 1`` tokens at stride ``seq_len``, so that each token but those
    of an unfinished last window is a target once an epoch. Sample i of step s is number
    ``n = s * global_batch + i`` in an endless row of epochs.
    """

    def __init__(self, tokens: NDArray[np.integer], seq_len: int, global_batch: int, seed: int) -> None:
        """Cut ``tokens`` (N,), N >= seq_len + 1."""
        self.windows = _count_windows(tokens, seq_len)
        """Sequences in one epoch."""
        self._tokens, self._seq_len = tokens, seq_len
        self._global_batch, self._seed = global_batch, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def sequences(self, step: int, first: int, count: int) -> NDArray[np.int64]:
        """Samples ``first`` to ``first + count`` of a step's global batch: (count, seq_len + 1)."""
        assert step >= 0
        assert 0 <= first <= first + count <= self._global_batch
        begin = step * self._global_batch + first
        windows = [self._window(number) for number in range(begin, begin + count)]
        return _cut(self._tokens, self._seq_len, np.array(windows, np.int64))

    def _window(self, number: int) -> int:
        epoch, place = divmod(number, self.windows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self.windows)
        return int(self._order[place])


def held_out_windows(tokens: NDArray[np.integer], seq_len: int, limit_tokens: int) -> NDArray[np.int64]:
    """Whole sequences spread evenly over a held-out text: (n, seq_len + 1).

    Args:
        tokens: held-out tokens (M,), M >= seq_len + 1.
        seq_len: targets in a sequence (tokens).
        limit_tokens: at most so many targets, but one sequence at least.
    """
    there = _count_windows(tokens, seq_len)
    n = min(max(limit_tokens // seq_len, 1), there)
    return _cut(tokens, seq_len, (2 * np.arange(n, dtype=np.int64) + 1) * there // (2 * n))


def _count_windows(tokens: NDArray[np.integer], seq_len: int) -> int:
    windows = (len(tokens) - 1) // seq_len
    if windows < 1:
        raise ValueError(f"{len(tokens)} tokens are too few for a sequence; {seq_len + 1} or more are needed")
    return windows


def _cut(tokens: NDArray[np.integer], seq_len: int, windows: NDArray[np.int64]) -> NDArray[np.int64]:
    places = windows[:, None] * seq_len + np.arange(seq_len + 1)
    cut: NDArray[np.int64] = tokens[places].astype(np.int64)
    return cut

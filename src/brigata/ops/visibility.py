"""Which keys a query sees, in blocks of queries, so that no mask grows with the square of the sequence."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from brigata.ops.documents import document_starts

BLOCK = 512
"""Queries of one block where a mask is needed."""


@dataclass(frozen=True)
class QueryBlock:
    """Consecutive queries and the keys that any of them sees.

    Attributes:
        queries: of the new tokens.
        keys: of cached and new tokens side by side.
        mask: (1 or count, 1, queries, keys), 0 where a query sees a key, else -inf; None: see ``causal``.
        causal: without a mask: whether query i sees the keys up to i only; else every query sees every key.
    """

    queries: slice
    keys: slice
    mask: Tensor | None
    causal: bool


def query_blocks(
    new: int, seen: int, window: int | None, documents: Tensor | None, like: Tensor
) -> tuple[QueryBlock, ...]:
    """Blocks of ``new`` queries over ``seen`` cached keys followed by ``new`` own ones.

    Query i is key ``seen + i``; it sees itself and what is before it, of these the last ``window`` keys only,
    and of those its own document only.

    Args:
        new: tokens of each sequence.
        seen: cached tokens ahead of them.
        window: keys that a query sees, itself included; None: all.
        documents: (count, new) int64, rising; None: one document a sequence. Not with ``seen``.
        like: masks get its dtype and device.
    """
    window = None if window is None or window >= seen + new else window
    if documents is not None:
        assert seen == 0
        starts = document_starts(documents)
        if bool(starts.any()):
            return tuple(_packed(starts, window, like))
    if window is None and (seen == 0 or new == 1):
        return (QueryBlock(slice(0, new), slice(0, seen + new), None, causal=seen == 0),)
    return tuple(_windowed(new, seen, window, like))


def _windowed(new: int, seen: int, window: int | None, like: Tensor) -> Iterator[QueryBlock]:
    """Blocks whose mask depends on their place alone: equal ones share one."""
    masks: dict[tuple[int, int], Tensor] = {}
    for queries in _spans(new):
        first = 0 if window is None else max(0, seen + queries.start - window + 1)
        keys = slice(first, seen + queries.stop)
        size, before = queries.stop - queries.start, seen + queries.start - first
        if (size, before) not in masks:
            place = torch.arange(-before, size, device=like.device)
            sight = _within(place[before:, None], place, window)
            masks[size, before] = _additive(sight[None, None], like)
        yield QueryBlock(queries, keys, masks[size, before], causal=False)


def _packed(starts: Tensor, window: int | None, like: Tensor) -> Iterator[QueryBlock]:
    """Blocks of packed documents, starts (count, length) as of ``document_starts``."""
    length = starts.shape[1]
    spans = list(_spans(length))
    earliest = starts[:, ::BLOCK].amin(0).tolist()
    for queries, reach in zip(spans, earliest, strict=True):
        first = reach if window is None else max(reach, queries.start - window + 1)
        keys = slice(first, queries.stop)
        place = torch.arange(length, device=like.device)
        sight = _within(place[queries, None], place[keys], window)
        sight = sight & (starts[:, queries, None] <= place[keys])
        yield QueryBlock(queries, keys, _additive(sight[:, None], like), causal=False)


def _spans(new: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, new)) for start in range(0, new, BLOCK))


def _within(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    sight = keys <= queries
    return sight if window is None else sight & (keys > queries - window)


def _additive(sight: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(sight.shape, dtype=like.dtype, device=like.device).masked_fill_(~sight, -torch.inf)

"""Tokens to everybody and back to their owners, without products, and small sums over ranks.

For what cannot run while its messages travel: where a choice depends on all tokens (experts), or a mean runs
over channels that several ranks hold (a gated norm).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brigata.overlap.auto import Work
from brigata.overlap.channel import Channel
from brigata.overlap.executor import allocate, execute
from brigata.schedule.build import OUTPUT
from brigata.schedule.chunks import split_evenly


class _GatherTokens(torch.autograd.Function):
    """Every rank's tokens at every rank.

    Per rank, T tokens, n ranks::

        forward    X (T/n, D)    -> X (T, D)      gathered
        backward   dX (T, D)     -> dX (T/n, D)   summed over ranks, each chunk at its owner
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel, rows: tuple[int, ...]) -> Tensor:
        ctx.channel, ctx.rows = channel, rows
        return _gather(x, channel, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter(grads[0], ctx.channel, ctx.rows), None, None


class _ScatterTokens(torch.autograd.Function):
    """Every rank's contribution to every token, summed at the token's owner.

    Per rank, T tokens, n ranks::

        forward    Y (T, D)      -> Y (T/n, D)    summed over ranks, each chunk at its owner
        backward   dY (T/n, D)   -> dY (T, D)     gathered
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, channel: Channel, rows: tuple[int, ...]) -> Tensor:
        ctx.channel, ctx.rows = channel, rows
        return _scatter(y, channel, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grads[0], ctx.channel, ctx.rows), None, None


class _SumOverRanks(torch.autograd.Function):
    """Y = sum over ranks of X, the same at every rank; the gradient of X is the sum of all ranks' dY."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        return _sum(x, channel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grads[0], ctx.channel), None


def _gather(x: Tensor, channel: Channel, rows: tuple[int, ...]) -> Tensor:
    plan = channel.prepare("exchange", rows, Work(0.0, x.shape[1], x.element_size()))
    gathered = x.new_empty(sum(rows), x.shape[1])
    gathered[plan.chunks.chunk_span(channel.rank)] = x
    execute(channel, "exchange", plan, allocate(plan, x.shape[1], x, gathered), {})
    return gathered


def _scatter(y: Tensor, channel: Channel, rows: tuple[int, ...]) -> Tensor:
    plan = channel.prepare("scatter", rows, Work(0.0, y.shape[1], y.element_size()))
    own = y.new_empty(rows[channel.rank], y.shape[1])

    def copy(span: slice, out: Tensor | None) -> None:
        assert out is not None
        out.copy_(y[span])

    execute(channel, "scatter", plan, allocate(plan, y.shape[1], y, None, own), {OUTPUT: copy})
    return own


def _sum(x: Tensor, channel: Channel) -> Tensor:
    """In rank order, so that every rank has the same bits: (T, k) -> (T, k)."""
    first, *others = _gather(x, channel, (len(x),) * channel.size).view(channel.size, *x.shape)
    total = first.clone()
    for other in others:
        total.add_(other)
    return total


def gather_tokens(x: Tensor, channel: Channel, rows: Sequence[int] | None = None) -> Tensor:
    """Every rank's tokens: x (rows of this rank, width) -> (all tokens, width).

    ``rows``: tokens of each rank; default: all as many as this one.
    """
    rows = (len(x),) * channel.size if rows is None else rows
    return _GatherTokens.apply(x, channel, tuple(rows))  # type: ignore[no-any-return]


def scatter_tokens(y: Tensor, channel: Channel, rows: Sequence[int] | None = None) -> Tensor:
    """Sum contributions over ranks: y (all tokens, width) -> (rows of this rank, width).

    ``rows``: tokens that each rank gets; default: as even as whole rows allow.
    """
    rows = split_evenly(len(y), channel.size) if rows is None else rows
    return _ScatterTokens.apply(y, channel, tuple(rows))  # type: ignore[no-any-return]


def sum_over_ranks(x: Tensor, channel: Channel) -> Tensor:
    """The sum of all ranks' x (tokens, k), for small k: everybody's x goes to everybody."""
    return _SumOverRanks.apply(x, channel)  # type: ignore[no-any-return]

"""Linear operators whose messages travel while their products run, forward and backward.

Both work on a residual stream that is cut by tokens over the group: rank r holds chunk r. A weight in a
wider dtype than its input (fp32 master, bf16 products) is cast once a call and gets its gradient in its own
dtype.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brigata.overlap.auto import Work
from brigata.overlap.channel import Channel
from brigata.overlap.executor import accumulation_dtype, allocate, execute
from brigata.schedule.build import INPUT_GRADIENT, OUTPUT, WEIGHT_GRADIENT
from brigata.schedule.chunks import split_evenly


class WeightGradient:
    """dW = dY.T @ X, summed over the runs of tokens in the order in which they are computed; (outputs,
    inputs).

    Runs of 16-bit products are added in fp32.
    """

    def __init__(self, whole: int, wanted: bool) -> None:
        self.whole = whole
        self.wanted = wanted
        self.value: Tensor | None = None

    def add(self, dy: Tensor, x: Tensor) -> None:
        """Add the product over one run of tokens: dy (tokens, outputs), x (tokens, inputs)."""
        if not self.wanted:
            return
        if len(dy) == self.whole or (self.value is None and dy.dtype.itemsize >= 4):
            self.value = torch.mm(dy.t(), x)
        elif self.value is None:
            self.value = torch.mm(dy.t(), x).to(accumulation_dtype(dy.dtype))
        elif self.value.dtype == dy.dtype:
            self.value.addmm_(dy.t(), x)
        else:
            self.value.add_(torch.mm(dy.t(), x))

    def result(self, like: Tensor) -> Tensor | None:
        """The gradient in the weight's dtype; None when it is not wanted."""
        if not self.wanted:
            return None
        return torch.zeros_like(like) if self.value is None else self.value.to(like.dtype)


class _AllGatherLinear(torch.autograd.Function):
    """Column-parallel products on a token-cut input: ``Y_i = gather(X) @ W_i.T``, one gather for all weights.

    Per rank, T tokens, n ranks, W_i cut by output features::

        forward    X (T/n, D)         W_i (F_i/n, D)  -> Y_i (T, F_i/n)
        backward   dY_i (T, F_i/n)    W_i             -> dX (T/n, D)      sums travel, remote chunks first
                   dY_i, X (T, D)                     -> dW_i (F_i/n, D)  fills the time in which dX travels

    X is kept gathered, or (keep=False) kept cut and gathered again: T * D * (n - 1) / n elements less
    memory for one more gather. Source: CommFuse (arXiv 2604.24013), algorithm 1; the backward is ours.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, channel: Channel, rows: Sequence[int], keep: bool, *masters: Tensor
    ) -> tuple[Tensor, ...]:
        weights = [master.to(x.dtype) for master in masters]
        work = work_of(x, x.shape[1], weights)
        plan = channel.prepare("all_gather_linear.forward", rows, work)
        chunks = plan.chunks
        gathered = x.new_empty(chunks.tokens, x.shape[1])
        gathered[chunks.chunk_span(channel.rank)] = x
        outputs = tuple(x.new_empty(chunks.tokens, weight.shape[0]) for weight in weights)

        def output(tokens: slice, _: Tensor | None) -> None:
            for y, weight in zip(outputs, weights, strict=True):
                torch.mm(gathered[tokens], weight.t(), out=y[tokens])

        memory = allocate(plan, x.shape[1], x, gathered, None)
        execute(channel, "all_gather_linear.forward", plan, memory, {OUTPUT: output})
        kept = gathered if keep else gathered[chunks.chunk_span(channel.rank)].clone()
        ctx.save_for_backward(kept, *weights)
        ctx.channel, ctx.rows, ctx.work, ctx.keep, ctx.masters = channel, rows, work, keep, masters
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        channel: Channel = ctx.channel
        kept, *weights = ctx.saved_tensors
        width = kept.shape[1]
        operator = "all_gather_linear.backward_kept" if ctx.keep else "all_gather_linear.backward"
        plan = channel.prepare(operator, ctx.rows, ctx.work)
        chunks = plan.chunks
        own = slice(0, chunks.rows[channel.rank])
        if ctx.keep:
            gathered = kept
        else:
            gathered = kept.new_empty(chunks.tokens, width)
            gathered[chunks.chunk_span(channel.rank)] = kept
        dx = kept.new_empty(own.stop, width)
        sums = [WeightGradient(chunks.tokens, wanted) for wanted in ctx.needs_input_grad[4:]]

        def input_gradient(tokens: slice, out: Tensor | None) -> None:
            assert out is not None
            torch.mm(grads[0][tokens], weights[0], out=out)
            for dy, weight in zip(grads[1:], weights[1:], strict=True):
                out.addmm_(dy[tokens], weight)

        def weight_gradient(tokens: slice, _: Tensor | None) -> None:
            for total, dy in zip(sums, grads, strict=True):
                total.add(dy[tokens], gathered[tokens])

        memory = allocate(plan, width, kept, gathered, dx)
        products = {INPUT_GRADIENT: input_gradient, WEIGHT_GRADIENT: weight_gradient}
        execute(channel, operator, plan, memory, products)
        dws = (total.result(master) for total, master in zip(sums, ctx.masters, strict=True))
        return (dx, None, None, None, *dws)


class _LinearReduceScatter(torch.autograd.Function):
    """Row-parallel product with a token-cut result: ``Y = scatter(sum over ranks of X @ W.T)``.

    Per rank, T tokens, n ranks, W cut by input features::

        forward    X (T, F/n)        W (D, F/n)        -> Y (T/n, D)       sums travel, own chunk last
        backward   dY (T/n, D) gathered, W             -> dX (T, F/n)      each arriving chunk feeds both
                   dY (T, D), X                        -> dW (D, F/n)      products

    Source: CommFuse (arXiv 2604.24013), its row-parallel algorithm; the backward is ours.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel, rows: Sequence[int], master: Tensor) -> Tensor:
        weight = master.to(x.dtype)
        work = work_of(x, weight.shape[0], [weight])
        plan = channel.prepare("linear_reduce_scatter.forward", rows, work)
        chunks = plan.chunks
        y = x.new_empty(chunks.rows[channel.rank], weight.shape[0])

        def output(tokens: slice, out: Tensor | None) -> None:
            assert out is not None
            torch.mm(x[tokens], weight.t(), out=out)

        memory = allocate(plan, weight.shape[0], x, None, y)
        execute(channel, "linear_reduce_scatter.forward", plan, memory, {OUTPUT: output})
        ctx.save_for_backward(x, weight)
        ctx.channel, ctx.rows, ctx.work, ctx.master = channel, rows, work, master
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        channel: Channel = ctx.channel
        x, weight = ctx.saved_tensors
        plan = channel.prepare("linear_reduce_scatter.backward", ctx.rows, ctx.work)
        chunks = plan.chunks
        (dy,) = grads
        gathered = dy.new_empty(chunks.tokens, dy.shape[1])
        gathered[chunks.chunk_span(channel.rank)] = dy
        dx = x.new_empty(x.shape)
        total = WeightGradient(chunks.tokens, ctx.needs_input_grad[3])

        def input_gradient(tokens: slice, _: Tensor | None) -> None:
            torch.mm(gathered[tokens], weight, out=dx[tokens])

        def weight_gradient(tokens: slice, _: Tensor | None) -> None:
            total.add(gathered[tokens], x[tokens])

        memory = allocate(plan, dy.shape[1], dy, gathered, None)
        products = {INPUT_GRADIENT: input_gradient, WEIGHT_GRADIENT: weight_gradient}
        execute(channel, "linear_reduce_scatter.backward", plan, memory, products)
        return dx, None, None, total.result(ctx.master)


def work_of(x: Tensor, width: int, weights: Sequence[Tensor]) -> Work:
    """What a token costs in one product with all ``weights``, and as a message of ``width`` elements."""
    return Work(2.0 * sum(weight.numel() for weight in weights), width, x.element_size())


def even_rows(channel: Channel, local_rows: int) -> tuple[int, ...]:
    """Chunk sizes when every rank holds as many tokens as this one."""
    return (local_rows,) * channel.size


def all_gather_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    channel: Channel,
    rows: Sequence[int] | None = None,
    keep_gathered: bool = True,
) -> tuple[Tensor, ...]:
    """Gather the token-cut ``x`` and multiply it with each weight while it arrives.

    Args:
        x: (rows of this rank, inputs), any strides.
        weights: this rank's shares, each (outputs / n, inputs).
        channel: the group and its order.
        rows: tokens of each rank; default: all as many as this one.
        keep_gathered: keep the gathered input for the backward instead of gathering it again.

    Returns:
        One (all tokens, outputs / n) a weight.
    """
    rows = even_rows(channel, x.shape[0]) if rows is None else rows
    return _AllGatherLinear.apply(x, channel, tuple(rows), keep_gathered, *weights)  # type: ignore[no-any-return]


def linear_reduce_scatter(
    x: Tensor, weight: Tensor, channel: Channel, rows: Sequence[int] | None = None
) -> Tensor:
    """Multiply ``x`` with this rank's share of ``weight`` and sum the results over ranks, each to its owner.

    Args:
        x: (all tokens, inputs / n), any strides.
        weight: (outputs, inputs / n).
        channel: the group and its order.
        rows: tokens that each rank gets; default: as even as whole rows allow.

    Returns:
        (rows of this rank, outputs).
    """
    rows = split_evenly(x.shape[0], channel.size) if rows is None else rows
    return _LinearReduceScatter.apply(x, channel, tuple(rows), weight)  # type: ignore[no-any-return]

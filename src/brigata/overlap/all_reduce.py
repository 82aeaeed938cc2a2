"""Linear operators of plain tensor parallelism: activations are whole on every rank.

The residual stream is not cut: every rank holds all tokens. The cut of the tokens by which these operators
work only says which rank sums which of them for everybody. Wider weights are cast as in ``linear``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brigata.overlap.channel import Channel
from brigata.overlap.executor import allocate, execute
from brigata.overlap.linear import WeightGradient, work_of
from brigata.schedule.build import INPUT_GRADIENT, OUTPUT, WEIGHT_GRADIENT
from brigata.schedule.chunks import split_evenly


class _LinearAllReduce(torch.autograd.Function):
    """Row-parallel product whose result every rank gets whole: ``Y = sum over ranks of X @ W.T``.

    Per rank, T tokens, n ranks, W cut by input features::

        forward    X (T, F/n)    W (D, F/n)    -> Y (T, D)       sums travel, then each chunk's total
        backward   dY (T, D)     W             -> dX (T, F/n)    no message: dY is whole everywhere
                   dY, X                       -> dW (D, F/n)

    Order of steps: ``schedule.all_reduce``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel, rows: Sequence[int], master: Tensor) -> Tensor:
        weight = master.to(x.dtype)
        work = work_of(x, weight.shape[0], [weight])
        plan = channel.prepare("linear_all_reduce.forward", rows, work)
        y = x.new_empty(plan.chunks.tokens, weight.shape[0])

        def output(tokens: slice, out: Tensor | None) -> None:
            assert out is not None
            torch.mm(x[tokens], weight.t(), out=out)

        memory = allocate(plan, weight.shape[0], x, gathered=y)
        execute(channel, "linear_all_reduce.forward", plan, memory, {OUTPUT: output})
        ctx.save_for_backward(x, weight)
        ctx.channel, ctx.rows, ctx.work, ctx.master = channel, rows, work, master
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        channel: Channel = ctx.channel
        x, weight = ctx.saved_tensors
        plan = channel.prepare("linear_all_reduce.backward", ctx.rows, ctx.work)
        (dy,) = grads
        dx = x.new_empty(x.shape)
        total = WeightGradient(plan.chunks.tokens, ctx.needs_input_grad[3])

        def input_gradient(tokens: slice, _: Tensor | None) -> None:
            torch.mm(dy[tokens], weight, out=dx[tokens])

        def weight_gradient(tokens: slice, _: Tensor | None) -> None:
            total.add(dy[tokens], x[tokens])

        memory = allocate(plan, dy.shape[1], dy)
        products = {INPUT_GRADIENT: input_gradient, WEIGHT_GRADIENT: weight_gradient}
        execute(channel, "linear_all_reduce.backward", plan, memory, products)
        return dx, None, None, total.result(ctx.master)


class _ColumnLinear(torch.autograd.Function):
    """Column-parallel products on an input that every rank holds whole: ``Y_i = X @ W_i.T``, dX summed once.

    Per rank, T tokens, n ranks, W_i cut by output features::

        forward    X (T, D)         W_i (F_i/n, D)  -> Y_i (T, F_i/n)   no message
        backward   dY_i (T, F_i/n)  W_i             -> dX (T, D)        sums travel, then each chunk's total
                   dY_i, X                          -> dW_i (F_i/n, D)  fills the time in which dX travels

    Order of steps: ``schedule.all_reduce``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, channel: Channel, rows: Sequence[int], *masters: Tensor
    ) -> tuple[Tensor, ...]:
        weights = [master.to(x.dtype) for master in masters]
        work = work_of(x, x.shape[1], weights)
        plan = channel.prepare("column_all_reduce.forward", rows, work)
        outputs = tuple(x.new_empty(plan.chunks.tokens, weight.shape[0]) for weight in weights)

        def output(tokens: slice, _: Tensor | None) -> None:
            for y, weight in zip(outputs, weights, strict=True):
                torch.mm(x[tokens], weight.t(), out=y[tokens])

        execute(channel, "column_all_reduce.forward", plan, allocate(plan, x.shape[1], x), {OUTPUT: output})
        ctx.save_for_backward(x, *weights)
        ctx.channel, ctx.rows, ctx.work, ctx.masters = channel, rows, work, masters
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        channel: Channel = ctx.channel
        x, *weights = ctx.saved_tensors
        plan = channel.prepare("column_all_reduce.backward", ctx.rows, ctx.work)
        tokens = plan.chunks.tokens
        dx = x.new_empty(tokens, x.shape[1])
        sums = [WeightGradient(tokens, wanted) for wanted in ctx.needs_input_grad[3:]]

        def input_gradient(tokens: slice, out: Tensor | None) -> None:
            assert out is not None
            torch.mm(grads[0][tokens], weights[0], out=out)
            for dy, weight in zip(grads[1:], weights[1:], strict=True):
                out.addmm_(dy[tokens], weight)

        def weight_gradient(tokens: slice, _: Tensor | None) -> None:
            for total, dy in zip(sums, grads, strict=True):
                total.add(dy[tokens], x[tokens])

        memory = allocate(plan, x.shape[1], x, gathered=dx)
        products = {INPUT_GRADIENT: input_gradient, WEIGHT_GRADIENT: weight_gradient}
        execute(channel, "column_all_reduce.backward", plan, memory, products)
        dws = (total.result(master) for total, master in zip(sums, ctx.masters, strict=True))
        return (dx, None, None, *dws)


def linear_all_reduce(
    x: Tensor, weight: Tensor, channel: Channel, rows: Sequence[int] | None = None
) -> Tensor:
    """Multiply ``x`` with this rank's share of ``weight`` and sum the results over ranks, for every rank.

    Args:
        x: (all tokens, inputs / n), any strides.
        weight: (outputs, inputs / n).
        channel: the group and its order.
        rows: tokens that each rank sums; default: as even as whole rows allow.

    Returns:
        (all tokens, outputs), bitwise the same on every rank.
    """
    rows = split_evenly(x.shape[0], channel.size) if rows is None else rows
    return _LinearAllReduce.apply(x, channel, tuple(rows), weight)  # type: ignore[no-any-return]


def column_linear(
    x: Tensor, weights: Sequence[Tensor], channel: Channel, rows: Sequence[int] | None = None
) -> tuple[Tensor, ...]:
    """Multiply ``x``, the same on every rank, with each weight; its gradient is summed over ranks.

    Args:
        x: (all tokens, inputs), any strides.
        weights: this rank's shares, each (outputs / n, inputs).
        channel: the group and its order.
        rows: tokens whose gradient each rank sums; default: as even as whole rows allow.

    Returns:
        One (all tokens, outputs / n) a weight.
    """
    rows = split_evenly(x.shape[0], channel.size) if rows is None else rows
    return _ColumnLinear.apply(x, channel, tuple(rows), *weights)  # type: ignore[no-any-return]

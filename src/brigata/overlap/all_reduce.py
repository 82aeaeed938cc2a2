"""Linear operators of plain tensor parallelism: activations are whole on every rank.

The residual stream is not cut: every rank holds all tokens. The cut of the tokens by which these operators
work only says which rank sums which of them for everybody. Wider weights are cast, and weight gradients are
deferred, as in ``linear``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brigata.overlap.channel import Channel
from brigata.overlap.linear import Call, Passes, run_backward
from brigata.overlap.products import WeightGradients, input_product, output_product
from brigata.schedule.build import OUTPUT
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
    def forward(ctx: Any, x: Tensor, call: Call, _: Tensor | None, master: Tensor) -> Tensor:
        weight = master.to(x.dtype)
        y = x.new_empty(len(x), weight.shape[0])
        call.run("linear_all_reduce.forward", {OUTPUT: output_product(x, [weight])}, y, gathered=y)
        ctx.save_for_backward(x, weight)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        x, weight = ctx.saved_tensors
        dx = x.new_empty(x.shape)
        dws = run_backward(
            call,
            _ROW,
            input_product(grads, [weight], dx),
            lambda: WeightGradients(grads, x, call.masters),
            held=(x, *grads),
            like=grads[0],
        )
        return dx, None, None, *dws


_ROW = Passes(
    "linear_all_reduce.backward", "linear_all_reduce.backward_input", "linear_all_reduce.backward_weight"
)


class _ColumnLinear(torch.autograd.Function):
    """Column-parallel products on an input that every rank holds whole: ``Y_i = X @ W_i.T``, dX summed once.

    Per rank, T tokens, n ranks, W_i cut by output features::

        forward    X (T, D)         W_i (F_i/n, D)  -> Y_i (T, F_i/n)   no message
        backward   dY_i (T, F_i/n)  W_i             -> dX (T, D)        sums travel, then each chunk's total
                   dY_i, X                          -> dW_i (F_i/n, D)  fills the time in which dX travels

    Order of steps: ``schedule.all_reduce``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, _: Tensor | None, *masters: Tensor) -> tuple[Tensor, ...]:
        weights = [master.to(x.dtype) for master in masters]
        outputs = tuple(x.new_empty(len(x), weight.shape[0]) for weight in weights)
        call.run("column_all_reduce.forward", {OUTPUT: output_product(x, weights, outputs)}, x)
        ctx.save_for_backward(x, *weights)
        ctx.call = call
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        x, *weights = ctx.saved_tensors
        dx = x.new_empty(x.shape)
        dws = run_backward(
            call,
            _COLUMN,
            input_product(grads, weights),
            lambda: WeightGradients(grads, x, call.masters),
            held=(x, *grads),
            like=dx,
            gathered=dx,
        )
        return (dx, None, None, *dws)


_COLUMN = Passes(
    "column_all_reduce.backward", "column_all_reduce.backward_input", "column_all_reduce.backward_weight"
)


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
    call = Call.of(channel, rows, weight.shape[0], x, [weight])
    return _LinearAllReduce.apply(x, call, *call.inputs)  # type: ignore[no-any-return]


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
    call = Call.of(channel, rows, x.shape[1], x, weights)
    return _ColumnLinear.apply(x, call, *call.inputs)  # type: ignore[no-any-return]

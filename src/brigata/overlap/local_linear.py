"""A linear operator of one process, which can defer its weight gradients as those of a group do."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from brigata.overlap.deferred import Deferral, WeightGradientQueue
from brigata.overlap.executor import Product
from brigata.overlap.products import WeightGradients, input_product, output_product
from brigata.schedule.build import INPUT_GRADIENT, OUTPUT, WEIGHT_GRADIENT


class _LocalLinear(torch.autograd.Function):
    """Products that share an input, ``Y_i = X @ W_i.T``.

    T tokens::

        forward    X (T, D)      W_i (F_i, D)  -> Y_i (T, F_i)
        backward   dY_i (T, F_i) W_i           -> dX (T, D)
                   dY_i, X                     -> dW_i (F_i, D)  later, where it is deferred
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        queue: WeightGradientQueue,
        deferral: Deferral | None,
        _: Tensor | None,
        *masters: Tensor,
    ) -> tuple[Tensor, ...]:
        weights = [master.to(x.dtype) for master in masters]
        outputs = tuple(x.new_empty(len(x), weight.shape[0]) for weight in weights)
        _run(queue, "local_linear.forward", len(x), {OUTPUT: output_product(x, weights, outputs)})
        ctx.save_for_backward(x, *weights)
        ctx.queue, ctx.deferral = queue, deferral
        ctx.masters = masters if deferral is None else deferral.weights
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queue, deferral, (x, *weights) = ctx.queue, ctx.deferral, ctx.saved_tensors
        dx = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        dws = WeightGradients(grads, x, ctx.masters)
        first = {} if dx is None else {INPUT_GRADIENT: input_product(grads, weights, dx)}
        later = {WEIGHT_GRADIENT: dws.add}
        if deferral is None:
            _run(queue, "local_linear.backward", len(x), first | later)
            return (dx, None, None, None, *dws.results())

        def deferred() -> tuple[Tensor | None, ...]:
            _run(queue, "local_linear.backward_weight", len(x), later)
            return dws.results()

        _run(queue, "local_linear.backward_input", len(x), first)
        deferral.leave("local_linear.backward_weight", (x, *grads), deferred)
        return (dx, None, None, None, *(None for _ in weights))


def _run(queue: WeightGradientQueue, operator: str, tokens: int, products: Mapping[str, Product]) -> None:
    """Compute ``products`` over all tokens, counted as those of a group's operators are."""
    queue.evidence.operators[operator].calls += 1
    for name, product in products.items():
        with queue.evidence.computing(operator, name):
            product(slice(0, tokens), None)


def local_linear(x: Tensor, weights: Sequence[Tensor], queue: WeightGradientQueue) -> tuple[Tensor, ...]:
    """Multiply ``x`` with each weight; a call while ``queue`` is active leaves their gradients to it.

    Args:
        x: (tokens, inputs), any strides.
        weights: each (outputs, inputs), maybe in a wider dtype than x: then it is cast once a call.
        queue: active or not; products are counted in its evidence.

    Returns:
        One (tokens, outputs) a weight, in x's dtype.
    """
    deferral = Deferral.of(queue, weights)
    seen = (None, *weights) if deferral is None else (deferral.anchor, *deferral.detached)
    return _LocalLinear.apply(x, queue, deferral, *seen)  # type: ignore[no-any-return, no-untyped-call]

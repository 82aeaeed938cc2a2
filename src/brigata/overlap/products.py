"""The products of a linear layer, run by run of tokens: Y, I (input gradient) and W (weight gradient)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from brigata.overlap.executor import Product, accumulation_dtype


def output_product(x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> Product:
    """Y_i = X @ W_i.T: into ``outputs``, or (of one weight) into the tensor given, where Y travels.

    Shapes: X (T, inputs), W_i (outputs_i, inputs), Y_i (T, outputs_i).
    """

    def output(tokens: slice, out: Tensor | None) -> None:
        into = [out] if outputs is None else [y[tokens] for y in outputs]
        for y, weight in zip(into, weights, strict=True):
            assert y is not None
            torch.mm(x[tokens], weight.t(), out=y)

    return output


def input_product(grads: Sequence[Tensor], weights: Sequence[Tensor], dx: Tensor | None = None) -> Product:
    """dX = sum over i of dY_i @ W_i: into ``dx``, or into the tensor given, where dX travels.

    Shapes: dY_i (T, outputs_i), W_i (outputs_i, inputs), dX (T, inputs).
    """

    def input_gradient(tokens: slice, out: Tensor | None) -> None:
        into = out if dx is None else dx[tokens]
        assert into is not None
        torch.mm(grads[0][tokens], weights[0], out=into)
        for dy, weight in zip(grads[1:], weights[1:], strict=True):
            into.addmm_(dy[tokens], weight)

    return input_gradient


class WeightGradients:
    """dW_i = dY_i.T @ X for all weights that share X, summed over runs of tokens as they are computed.

    Runs of 16-bit products are added in fp32.

    Args:
        grads: dY_i, each (T, outputs_i).
        x: (T, inputs).
        masters: the weights as they were handed in, each (outputs_i, inputs). One that requires no gradient
            gets none; the others get theirs in their own dtypes.
    """

    def __init__(self, grads: Sequence[Tensor], x: Tensor, masters: Sequence[Tensor]) -> None:
        self.grads, self.x, self.masters = grads, x, masters
        self._sums: list[Tensor | None] = [None] * len(masters)

    def add(self, tokens: slice, _: Tensor | None = None) -> None:
        """The product over one run of tokens."""
        for i, dy in enumerate(self.grads):
            if self.masters[i].requires_grad:
                self._sums[i] = self._plus(self._sums[i], dy[tokens], self.x[tokens])

    def results(self) -> tuple[Tensor | None, ...]:
        """One a weight, None where none is wanted; 0 where there are no tokens."""
        return tuple(map(self._result, self._sums, self.masters))

    def _result(self, total: Tensor | None, master: Tensor) -> Tensor | None:
        if total is None:
            return torch.zeros_like(master) if master.requires_grad else None
        return total.to(master.dtype)

    def _plus(self, total: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
        if len(dy) == len(self.x) or (total is None and dy.dtype.itemsize >= 4):
            return torch.mm(dy.t(), x)
        if total is None:
            return torch.mm(dy.t(), x).to(accumulation_dtype(dy.dtype))
        if total.dtype == dy.dtype:
            return total.addmm_(dy.t(), x)
        return total.add_(torch.mm(dy.t(), x))

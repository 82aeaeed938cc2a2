"""Products sliced by the ranks that own the rows of their weights, where nothing else hides a message.

A weight's rows are output features, and ZeRO cuts rows. In the first unit of a model nothing earlier hides
the gather of the input projections, and after their weight gradient only the embedding follows, which is a
lookup. There, products run rank by rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brigata.model.parts import Projections
from brigata.parallel.messages import GATHER
from brigata.parallel.parameter_group import ParameterGroup
from brigata.parallel.sharded_parameter import ShardedParameter


class _SlicedByOwner(torch.autograd.Function):
    """``Y_i = X @ W_i.T`` while W_i arrives, and its gradient while dW_i leaves.

    Per rank, T tokens, rank r owns the rows F_i[r] of W_i::

        forward    X (T, D), W_i[r] (F_i[r], D)    -> Y_i[:, r] (T, F_i[r])   own rows first
        backward   dY_i[:, r] (T, F_i[r]), X       -> dW_i[r] (F_i[r], D)     remote owners first, each sent
                   dY_i, W_i                       -> dX (T, D)               meanwhile
                   dY_i[:, r], X                   -> dW_i[r]                 own rows, at the step's end

    The own rows are computed when even the embedding's gradient has been sent: they hide that message too.
    The weights' gradients do not go through autograd, unless they stay here whole (ZeRO-1 ahead of a step's
    last micro-batch).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ParameterGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group = group
        if group.whole:
            return tuple(F.linear(x, weight) for weight in weights)
        outputs = tuple(x.new_empty(len(x), len(weight)) for weight in weights)
        group.evidence.operators[GATHER].overlapped_calls += 1
        for rank in group.arrivals("head"):
            with group.evidence.computing(GATHER, f"rows of rank {rank}"):
                for y, weight, parameter in zip(outputs, weights, _matrices(group), strict=True):
                    rows = parameter.span(rank)
                    torch.mm(x, weight[rows].t(), out=y[:, rows])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group: ParameterGroup = ctx.group
        wanted = ctx.needs_input_grad[2:]

        def rows_of_gradient(n: int, rows: slice, out: Tensor, add: bool) -> None:
            dy = grads[n][:, rows].t()
            if add:
                out.addmm_(dy, x)
            else:
                torch.mm(dy, x, out=out)

        dws: list[Tensor | None] = [None] * len(weights)
        if group.holding:
            dws = [dy.t() @ x if want else None for dy, want in zip(grads, wanted, strict=True)]
        else:
            numbered = enumerate(_matrices(group))
            group.scatter_by_owner([(n, matrix) for n, matrix in numbered if wanted[n]], rows_of_gradient)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = grads[0] @ weights[0]
            for dy, weight in zip(grads[1:], weights[1:], strict=True):
                dx.addmm_(dy, weight)
        return (dx, None, *dws)


def _matrices(group: ParameterGroup) -> list[ShardedParameter]:
    return [parameter for parameter in group.parameters if parameter.shard.ndim == 2]


class OwnerSlicedProjections(nn.Module):
    """``Projections`` under ZeRO, sliced by owner: x (T, D) -> one (T, F_i) a weight.

    ``group`` is the engine's; it holds this part's weights, in the order of their names, and biases that
    arrive with them.
    """

    def __init__(self, part: Projections, group: ParameterGroup) -> None:
        super().__init__()
        self.names, self.group = part.names, group
        for name in part.names:
            self.add_module(name, part.get_submodule(name))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project as weights arrive."""
        weights = (self.get_submodule(name).get_parameter("weight") for name in self.names)
        outputs: tuple[Tensor, ...] = _SlicedByOwner.apply(x, self.group, *weights)
        biases = (getattr(self.get_submodule(name), "bias", None) for name in self.names)
        pairs = zip(outputs, biases, strict=True)
        return tuple(y if bias is None else y + bias.to(y.dtype) for y, bias in pairs)

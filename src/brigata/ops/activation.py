"""Activations of feed-forwards, with backwards that keep the inputs alone."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Gated(torch.autograd.Function):
    """y = f(gate) * up, elementwise; f(gate) is computed anew in the backward instead of kept::

        dup = dy * f(gate)      dgate = dy * up * f'(gate)
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _activate(gate, kind).mul_(up)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        dup = _activate(gate, ctx.kind).mul_(dy)
        pull = dy * up
        if ctx.kind == "silu":
            dgate = torch.ops.aten.silu_backward(pull, gate)
        else:
            dgate = torch.ops.aten.gelu_backward(pull, gate, approximate="tanh")
        return dgate, dup, None


def _activate(x: Tensor, kind: str) -> Tensor:
    return F.silu(x) if kind == "silu" else F.gelu(x, approximate="tanh")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise. Source: Shazeer, arXiv 2002.05202."""
    return _Gated.apply(gate, up, "silu")  # type: ignore[no-any-return]


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, elementwise, GELU by its tanh approximation. Source: Shazeer, arXiv 2002.05202."""
    return _Gated.apply(gate, up, "gelu_tanh")  # type: ignore[no-any-return]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation. Source: Hendrycks and Gimpel, arXiv 1606.08415."""
    return F.gelu(x, approximate="tanh")


class _SquaredReLU(torch.autograd.Function):
    """y = max(x, 0)^2, dx = 2 * dy * max(x, 0)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(dy).mul_(2)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) ** 2. Source: So et al., arXiv 2109.08668."""
    return _SquaredReLU.apply(x)  # type: ignore[no-any-return]

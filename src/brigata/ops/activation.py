"""Activations of feed-forwards, with backwards that keep the inputs alone.

By name, as in ``ModelSpec.mlp``: ``swiglu`` silu(gate) * up and ``geglu_tanh`` gelu(gate) * up (Shazeer,
arXiv 2002.05202); ``gelu_tanh`` gelu(up), by its tanh form (Hendrycks and Gimpel, arXiv 1606.08415);
``relu2`` max(up, 0)**2 (So et al., arXiv 2109.08668).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def activation(kind: str, *inputs: Tensor) -> Tensor:
    """Elementwise: (gate, up) or (up,), each (tokens, ffn) -> a new (tokens, ffn)."""
    match kind:
        case "swiglu":
            return F.silu(inputs[0]).mul_(inputs[1])
        case "geglu_tanh":
            return F.gelu(inputs[0], approximate="tanh").mul_(inputs[1])
        case "gelu_tanh":
            return F.gelu(inputs[0], approximate="tanh")
        case "relu2":
            return F.relu(inputs[0]).square_()
    raise ValueError(f"no activation {kind!r}; use swiglu, geglu_tanh, gelu_tanh or relu2")


def activation_backward(kind: str, dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients of ``activation``'s inputs, from these and the result's gradient."""
    first = inputs[0]
    match kind:
        case "swiglu":
            slope = torch.ops.aten.silu_backward(dy * inputs[1], first)
            return slope, F.silu(first).mul_(dy)
        case "geglu_tanh":
            slope = torch.ops.aten.gelu_backward(dy * inputs[1], first, approximate="tanh")
            return slope, F.gelu(first, approximate="tanh").mul_(dy)
        case "gelu_tanh":
            return (torch.ops.aten.gelu_backward(dy, first, approximate="tanh"),)
        case "relu2":
            return (F.relu(first).mul_(dy).mul_(2),)
    raise ValueError(f"no activation {kind!r}; use swiglu, geglu_tanh, gelu_tanh or relu2")


class _Activate(torch.autograd.Function):
    """Everything between the inputs and the result is computed anew in the backward instead of kept."""

    @staticmethod
    def forward(ctx: Any, kind: str, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.kind = kind
        return activation(kind, *inputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *activation_backward(ctx.kind, dy, *ctx.saved_tensors))


def activate(kind: str, *inputs: Tensor) -> Tensor:
    """``activation`` with a gradient."""
    return _Activate.apply(kind, *inputs)  # type: ignore[no-any-return]

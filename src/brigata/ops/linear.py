"""A linear layer that is fast in 16 bits where the processor's own products are not."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from brigata.ops.products import product, slow_in_16_bits

FEW = 8
"""Fewer tokens than this are not worth widening a weight for."""


class _WideLinear(torch.autograd.Function):
    """y = x @ W^T + b: 16-bit x, W and y, products in fp32. Nothing wide is kept.

    x (tokens, inputs), W (outputs, inputs), b (outputs,) or None::

        dx = dy @ W      dW = dy^T @ x      db = sum over tokens of dy
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        wide = weight.to(x.dtype).t().float()
        if bias is None:
            return (x.float() @ wide).to(x.dtype)
        return torch.addmm(bias.to(x.dtype).float(), x.float(), wide).to(x.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            product(dy, weight.to(dy.dtype), x.dtype) if need_x else None,
            product(dy.t(), x, weight.dtype) if need_weight else None,
            dy.float().sum(0).to(ctx.bias_dtype) if need_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in x's dtype; weight and bias are cast to it, their gradients have their own.

    x (tokens, inputs), weight (outputs, inputs), bias (outputs,) -> (tokens, outputs).
    """
    if slow_in_16_bits(x) and len(x) >= FEW:
        return _WideLinear.apply(x, weight, bias)  # type: ignore[no-any-return]
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

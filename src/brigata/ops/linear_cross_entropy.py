"""The vocabulary projection and the cross-entropy on it in one, a chunk of tokens at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brigata.ops.loss import IGNORED
from brigata.ops.products import slow_in_16_bits

CHUNK_ON_CPU = 2**24
CHUNK_ELSEWHERE = 2**27
"""Logits that are held at a time (elements). A chunk needs to be large enough for its products to be fast."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over tokens of -log softmax(z)[target], z = softcap(multiplier * h @ W^T), never all of z at once.

    D wide, vocabulary V; a chunk of t tokens is finished, gradients included, before the next begins::

        forward    h (t, D), W (V, D)        -> z (t, V) -> loss
                   dz = softmax(z) - one-hot  -> dh (t, D) = dz W;  dW (V, D) += dz^T h
        backward   dh and dW times the loss's gradient

    Gradients in the forward save computing z twice, for the price of holding dW from here on. They are scaled
    in place, so that one backward is possible and a second is refused.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, multiplier: float, softcap: float | None,
        tokens: int,
    ) -> Tensor:  # fmt: skip
        need_h, need_weight = ctx.needs_input_grad[:2]
        wide = torch.float64 if h.dtype == torch.float64 else torch.float32
        work = wide if slow_in_16_bits(h) else h.dtype
        x, cast = h.to(work), weight.to(h.dtype).to(work)
        loss = torch.zeros((), dtype=wide, device=h.device)
        dh = torch.empty_like(h) if need_h else None
        dw = torch.zeros(weight.shape, dtype=wide, device=h.device) if need_weight else None
        room = torch.empty(min(tokens, len(h)), len(weight), dtype=wide, device=h.device)
        for part in _spans(len(h), tokens):
            near = None if dh is None else dh[part]
            loss += _chunk(x[part], cast, targets[part], multiplier, softcap, room, near, dw)
        del cast, room  # the narrow copy of dw takes their place
        dw = None if dw is None else dw.to(weight.dtype)
        ctx.gradients = (dh, dw)
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the loss's backward ran already, and its gradients are gone; compute the loss anew"
            )
        gradients, ctx.gradients = ctx.gradients, None
        (factor,) = grads
        dh, dw = (None if x is None else x.mul_(factor) for x in gradients)
        return dh, dw, None, None, None, None


def _spans(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _chunk(
    x: Tensor, weight: Tensor, targets: Tensor, multiplier: float, softcap: float | None, room: Tensor,
    dh: Tensor | None, dw: Tensor | None,
) -> Tensor:  # fmt: skip
    """The loss of a chunk of tokens; its gradients go into ``dh`` and are added to ``dw``."""
    z = _logits(x, weight, room)
    need = dh is not None or dw is not None
    slope = _finish(z, multiplier, softcap, need)
    loss = -_log_softmax_sum(z, targets)
    if need:
        dz = _logit_gradient(z, targets, multiplier, slope).to(x.dtype)
        if dh is not None:
            dh.copy_(dz @ weight)
        if dw is not None:
            dw.addmm_(dz.t(), x) if dw.dtype == x.dtype else dw.add_(dz.t() @ x)
    return loss


def _logits(x: Tensor, weight: Tensor, room: Tensor) -> Tensor:
    """x @ weight.T in the first rows of ``room``: memory that is used again costs no page faults."""
    z = room[: len(x)]
    return torch.mm(x, weight.t(), out=z) if z.dtype == x.dtype else z.copy_(x @ weight.t())


def _finish(z: Tensor, multiplier: float, softcap: float | None, need_slope: bool) -> Tensor | None:
    """Scale and squash z in place; the squashing's derivative, where one is needed."""
    if multiplier != 1.0:
        z.mul_(multiplier)
    if softcap is None:
        return None
    z.div_(softcap).tanh_()
    slope = 1 - z.square() if need_slope else None
    z.mul_(softcap)
    return slope


def _log_softmax_sum(z: Tensor, targets: Tensor) -> Tensor:
    """z becomes its log-softmax, in place -> the sum of the targets' entries; ignored ones do not count."""
    torch.log_softmax(z, -1, out=z)
    counts = targets != IGNORED
    picked = z.gather(1, targets.masked_fill(~counts, 0)[:, None])[:, 0]
    return picked.masked_fill(~counts, 0).sum()


def _logit_gradient(logarithm: Tensor, targets: Tensor, multiplier: float, slope: Tensor | None) -> Tensor:
    """The log-softmax becomes the loss's gradient with respect to the product's result, in place."""
    counts = targets != IGNORED
    one = counts.to(logarithm.dtype)[:, None]
    dz = logarithm.exp_()
    dz.masked_fill_(~counts[:, None], 0)
    dz.scatter_add_(1, targets.masked_fill(~counts, 0)[:, None], -one)
    if slope is not None:
        dz.mul_(slope)
    return dz if multiplier == 1.0 else dz.mul_(multiplier)


def linear_cross_entropy_sum(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    multiplier: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Sum over tokens of the negative log-likelihood of the targets (nats), without holding all logits.

    Products in h's dtype, softmax and sum in fp32 or better. May be differentiated once, and not twice.

    Args:
        h: (tokens, hidden).
        weight: (vocab, hidden), maybe in a wider dtype than h; its gradient has its own dtype.
        targets: (tokens,) int64; those equal to ``IGNORED`` do not count.
        multiplier: factor on the logits.
        softcap: logits are then squashed to softcap * tanh(logit / softcap); None: not at all.
        chunk: tokens whose logits are held at a time. Default: what is fast on the device.

    Returns:
        A scalar in fp32 or better.

    Raises:
        RuntimeError: a second backward through the result.
    """
    if chunk is None:
        room = CHUNK_ON_CPU if h.device.type == "cpu" else CHUNK_ELSEWHERE
        chunk = max(1, room // weight.shape[0])
    if not torch.is_grad_enabled():
        h, weight = h.detach(), weight.detach()  # a Function is not told, and would compute gradients
    return _LinearCrossEntropy.apply(h, weight, targets, multiplier, softcap, chunk)  # type: ignore[no-any-return]

"""Mamba-2's scan (state-space duality, SSD) over whole sequences, in matrix products.

Source: Dao and Gu, arXiv 2405.21060. Memory is linear in the sequence: inputs and one state a chunk are kept,
decayed scores are computed again in the backward.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brigata.ops.ssd_chunk import block_gradients, chunk_states, cut_block, outputs, state_gradients
from brigata.ops.ssd_kernel import kernel_scan, scan_kernel

BLOCK_TOKENS = 512
"""Tokens of all sequences whose scores are in memory at once."""


def fastest_chunk(length: int, head_dim: int, state: int, device: torch.device) -> int:
    """Tokens of a chunk; the result of the scan does not depend on it.

    Work a token grows with the chunk (scores), the number of states falls with it. On a CPU scores cost
    memory traffic and small chunks win; accelerators want products that fill their tiles.
    """
    chunk = 64 if device.type == "cpu" else 128
    if max(head_dim, state) <= 32:
        chunk //= 2
    return min(chunk, max(length, 1))


def _blocks(length: int, chunk: int, sequences: int) -> Iterator[tuple[slice, int]]:
    """Spans of tokens, each a whole number of chunks, and the chunk of each; the last chunk may be short."""
    whole = length // chunk * chunk
    tokens = max(BLOCK_TOKENS // sequences // chunk, 1) * chunk
    for start in range(0, whole, tokens):
        yield slice(start, min(start + tokens, whole)), chunk
    if whole < length:
        yield slice(whole, length), length - whole


class _Scan(torch.autograd.Function):
    """b sequences of l tokens, H heads of P channels, G groups, state N::

    x (b, l, H, P), dt (b, l, H), a (H,), B and C (b, l, G, N), h (b, H, P, N)
    -> y (b, l, H, P), h at the end (b, H, P, N)
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, h: Tensor,
        segments: Tensor | None, chunk: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        states = []
        for span, size in _blocks(x.shape[1], chunk, len(x)):
            block = cut_block(x, dt, a, b, c, segments, span, size)
            added, across = chunk_states(block), block.across()[..., None, None]
            entered = torch.empty_like(added)
            for k in range(added.shape[1]):
                entered[:, k] = h
                h = torch.addcmul(added[:, k], across[:, k], h)
            y[:, span] = outputs(block, entered).flatten(1, 2)
            states.append(entered)
        ctx.save_for_backward(x, dt, a, b, c, *states)
        ctx.segments, ctx.chunk = segments, chunk
        return y, h.clone() if not states else h

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, *states = ctx.saved_tensors
        dy, dh = grads
        dx, ddt, db, dc = (torch.empty_like(t) for t in (x, dt, b, c))
        da = torch.zeros_like(a)
        blocks = list(_blocks(x.shape[1], ctx.chunk, len(x)))
        for (span, size), entered in zip(reversed(blocks), reversed(states), strict=True):
            block = cut_block(x, dt, a, b, c, ctx.segments, span, size)
            turned = dy[:, span].unflatten(1, (-1, size)).transpose(2, 3).to(block.x.dtype).contiguous()
            given, across = state_gradients(block, turned), block.across()[..., None, None]
            dleft = torch.empty_like(entered)
            for k in reversed(range(entered.shape[1])):
                dleft[:, k] = dh
                dh = torch.addcmul(given[:, k], across[:, k], dh)
            found = block_gradients(block, turned, entered, dleft)
            # cum is a running sum: its gradient runs back over the chunk
            dstep = found.cum.flip(-1).cumsum(-1).flip(-1)
            step = dt[:, span].unflatten(1, (-1, size)).transpose(2, 3)
            original = x[:, span].unflatten(1, (-1, size)).transpose(2, 3)
            da += (dstep * step).sum((0, 1, 3))
            dstep = dstep * a[:, None] + (found.x.to(dt.dtype) * original).sum(-1)
            dx[:, span] = (found.x * step.to(found.x.dtype)[..., None]).transpose(2, 3).flatten(1, 2)
            ddt[:, span] = dstep.transpose(2, 3).flatten(1, 2)
            db[:, span] = found.b.transpose(2, 3).flatten(1, 2)
            dc[:, span] = found.c.transpose(2, 3).flatten(1, 2)
        return dx, ddt, da, db, dc, dh, None, None


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    initial: Tensor | None = None,
    segments: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t a) h_{t-1} + dt_t x_t B_t^T and y_t = h_t C_t, for every head.

    Args:
        x: (sequences, length, heads, head_dim).
        dt: (sequences, length, heads), step sizes, in fp32 or better.
        a: (heads,), negative, in dt's dtype.
        b: (sequences, length, groups, state); heads / groups neighbouring heads share a group.
        c: likewise.
        initial: state before the first token, (sequences, heads, head_dim, state) in dt's dtype; None: zero.
        segments: (sequences, length) int64, rising: the state begins anew with each segment; an initial
            state belongs to the first one.
        chunk: tokens of a chunk; default: the fastest, or on CUDA the kernels of ``mamba_ssm``, if they are
            installed. These have no fp64, which is computed here.

    Returns:
        y (sequences, length, heads, head_dim) and the state after the last token; both have gradients.
    """
    kernel = None if x.dtype == torch.float64 else scan_kernel(x.device)
    if kernel is not None and chunk is None and (initial is None or segments is None):
        return kernel_scan(kernel, x, dt, a, b, c, initial, segments)
    if initial is None:
        initial = dt.new_zeros(len(x), x.shape[2], x.shape[3], b.shape[3])
    chunk = fastest_chunk(x.shape[1], x.shape[3], b.shape[3], x.device) if chunk is None else chunk
    return _Scan.apply(x, dt, a, b, c, initial, segments, chunk)  # type: ignore[no-any-return]

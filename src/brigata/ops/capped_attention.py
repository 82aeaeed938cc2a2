"""Attention whose scores are squashed before the softmax, written out. Source: Gemma 2, arXiv 2408.00118."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brigata.ops.products import product
from brigata.ops.visibility import QueryBlock

MOST_SCORES = 2**23
"""Scores that are held at a time (elements): queries are taken in blocks of so many."""


class _CappedAttention(torch.autograd.Function):
    """O = softmax(cap * tanh(scale * Q K^T / cap) + mask) V, without keeping scores.

    q (count, heads, new, head_dim), k and v (count, kv_heads, keys, head_dim). Query heads that share a key
    head are stacked as more queries of that head. With t = tanh(scale * q k^T / cap), L the log-sum-exp of
    a query's scores, p = exp(cap * t + mask - L)::

        dV = p^T dO      dp = dO V^T      ds = p * (dp - sum(dO * O)) * (1 - t^2) * scale
        dQ = ds K        dK = ds^T Q

    The backward computes t and p anew: memory is that of the inputs and of one block of scores.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[QueryBlock], scale: float, cap: float
    ) -> Tensor:
        out = torch.empty_like(q)
        logsumexp = torch.empty(q.shape[:3], dtype=_wide(q).dtype, device=q.device)
        for rows, keys, mask in _pieces(q, blocks):
            scores = _tanh_scores(q[:, :, rows], k[:, :, keys], scale, cap).mul_(cap)
            if mask is not None:
                scores += mask
            total = scores.logsumexp(-1)
            weights = scores.sub_(total[..., None]).exp_().to(q.dtype)
            out[:, :, rows] = _weighted(weights, v[:, :, keys])
            logsumexp[:, :, rows] = total
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.blocks, ctx.scale, ctx.cap = blocks, scale, cap
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        scale, cap = ctx.scale, ctx.cap
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=logsumexp.dtype, device=x.device) for x in (k, v))
        inner = (_wide(grad) * _wide(out)).sum(-1, keepdim=True)
        for rows, keys, mask in _pieces(q, ctx.blocks):
            squashed = _tanh_scores(q[:, :, rows], k[:, :, keys], scale, cap)
            weights = squashed * cap
            if mask is not None:
                weights += mask
            weights.sub_(logsumexp[:, :, rows, None]).exp_()
            dout = grad[:, :, rows]
            dv[:, :, keys] += _gathered(weights.to(q.dtype), dout, v.shape[1])
            ds = _scores(dout, v[:, :, keys]).sub_(inner[:, :, rows]).mul_(weights)
            ds = ds.mul_(squashed.square_().neg_().add_(1)).mul_(scale).to(q.dtype)
            dq[:, :, rows] = _weighted(ds, k[:, :, keys])
            dk[:, :, keys] += _gathered(ds, q[:, :, rows], k.shape[1])
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _pieces(q: Tensor, blocks: Sequence[QueryBlock]) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries, the keys they see and their additive mask, at most ``MOST_SCORES`` scores at a time."""
    for block in blocks:
        keys = block.keys.stop - block.keys.start
        size = max(1, MOST_SCORES // (q.shape[0] * q.shape[1] * keys))
        for start in range(block.queries.start, block.queries.stop, size):
            rows = slice(start, min(start + size, block.queries.stop))
            if block.causal:
                place = torch.arange(rows.stop, device=q.device)
                mask = torch.zeros(rows.stop - start, rows.stop, dtype=_wide(q[:0]).dtype, device=q.device)
                mask.masked_fill_(place > place[rows, None], -torch.inf)
                yield rows, slice(0, rows.stop), mask
            else:
                within = slice(start - block.queries.start, rows.stop - block.queries.start)
                yield rows, block.keys, None if block.mask is None else block.mask[:, :, within]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _stacked(x: Tensor, kv_heads: int) -> Tensor:
    """(count, heads, rows, width) -> (count, kv_heads, heads / kv_heads * rows, width)."""
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[3])


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q (count, heads, rows, width), k (count, kv_heads, keys, width) -> (count, heads, rows, keys)."""
    scores = product(_stacked(q, k.shape[1]), k.transpose(2, 3), _wide(q[:0]).dtype)
    return scores.view(*q.shape[:3], -1)


def _tanh_scores(q: Tensor, k: Tensor, scale: float, cap: float) -> Tensor:
    return _scores(q, k).mul_(scale / cap).tanh_()


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """weights (count, heads, rows, keys), v (count, kv_heads, keys, width) -> (count, heads, rows, width)."""
    return product(_stacked(weights, v.shape[1]), v, v.dtype).view(*weights.shape[:3], -1)


def _gathered(weights: Tensor, x: Tensor, kv_heads: int) -> Tensor:
    """weights (count, heads, rows, keys), x (count, heads, rows, width) -> (count, kv_heads, keys, width)."""
    return product(_stacked(weights, kv_heads).transpose(2, 3), _stacked(x, kv_heads), _wide(x[:0]).dtype)


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[QueryBlock], scale: float, cap: float
) -> Tensor:
    """Attention with squashed scores, heads ahead of tokens.

    Args:
        q: (count, heads, new, head_dim).
        k: (count, kv_heads, seen + new, head_dim).
        v: likewise.
        blocks: who sees whom.
        scale: factor on the scores.
        cap: scores stay within -cap .. cap.

    Returns:
        (count, heads, new, head_dim).
    """
    return _CappedAttention.apply(q, k, v, tuple(blocks), scale, cap)  # type: ignore[no-any-return]

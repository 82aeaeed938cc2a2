"""The feed-forwards of experts as grouped products: each expert works on the tokens that chose it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from brigata.ops.activation import activation, activation_backward


class _ExpertFeedForward(torch.autograd.Function):
    """Sum over a token's experts of weight * down(activation(gate(x), up(x))); no token is dropped.

    T tokens, k experts each, R = T * k rows in the order of their experts, F the inner width::

        forward    X (T, D)  -> rows (R, D)   -> G, U (R, F), kept -> A -> Y (R, D) -> summed (T, D)
        backward   dY rows @ down = d (R, F): weights get sum(d * A), A gets weight * d; A is computed again

    Rows of one expert are neighbours, so every product is a plain one. Sums over a token's experts run in the
    order in which it chose them.
    """

    @staticmethod
    def forward(
        ctx: Any, kind: str, x: Tensor, weights: Tensor, chosen: Tensor, *masters: Tensor
    ) -> Tensor:
        *ups, down = (master.to(x.dtype) for master in masters)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        counts = torch.bincount(chosen.flatten(), minlength=len(down)).tolist()
        rows = x[tokens]
        scale = weights.flatten()[order, None].to(x.dtype)
        inner = [rows.new_empty(len(rows), down.shape[2]) for _ in ups]
        y = rows.new_empty(rows.shape)
        for e, span in _spans(counts):
            for out, up in zip(inner, ups, strict=True):
                torch.mm(rows[span], up[e].t(), out=out[span])
            hidden = activation(kind, *(out[span] for out in inner))
            torch.mm(hidden.mul_(scale[span]), down[e].t(), out=y[span])
        ctx.save_for_backward(x, weights, order, *inner, *masters)
        ctx.kind, ctx.counts = kind, counts
        return _sum_over_choices(y, order, chosen.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, *saved = ctx.saved_tensors
        number = len(saved) // 2
        inner, masters = saved[:number], saved[number:]
        *ups, down = (master.to(x.dtype) for master in masters)
        tokens = order // weights.shape[1]
        rows, drows = x[tokens], grads[0][tokens]
        scale = weights.flatten()[order, None].to(x.dtype)
        dmasters = [torch.zeros_like(master) for master in masters]
        dweights = torch.zeros(len(order), dtype=weights.dtype, device=x.device)
        dx = rows.new_empty(rows.shape)
        for e, span in _spans(ctx.counts):
            before = [part[span] for part in inner]
            hidden = activation(ctx.kind, *before)
            dhidden = drows[span] @ down[e]
            dweights[span] = (dhidden * hidden).sum(1, dtype=weights.dtype)
            _put(dmasters[-1][e], drows[span].t(), hidden.mul_(scale[span]))
            dbefore = activation_backward(ctx.kind, dhidden.mul_(scale[span]), *before)
            for i, (gradient, up) in enumerate(zip(dbefore, ups, strict=True)):
                _put(dmasters[i][e], gradient.t(), rows[span])
                if i == 0:
                    torch.mm(gradient, up[e], out=dx[span])
                else:
                    dx[span].addmm_(gradient, up[e])
        unsorted = torch.empty_like(dweights)
        unsorted[order] = dweights
        return None, _sum_over_choices(dx, order, weights.shape), unsorted.view_as(weights), None, *dmasters


def _spans(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, with its rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _put(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, in out's dtype."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _sum_over_choices(rows: Tensor, order: Tensor, shape: torch.Size) -> Tensor:
    """Rows in the order of experts (T * k, D) -> sums over each token's k rows (T, D), in fp32 or better."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    wide = torch.float32 if rows.dtype.itemsize < 4 else rows.dtype
    places = back.view(shape)
    total = rows[places[:, 0]].to(wide)
    for choice in range(1, shape[1]):
        total += rows[places[:, choice]]
    return total.to(rows.dtype)


def expert_feed_forward(
    kind: str,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
) -> Tensor:
    """Each token's experts, weighted and summed.

    Args:
        kind: activation, as ``ModelSpec.mlp``.
        x: (tokens, hidden).
        weights: (tokens, k), of the chosen experts; they get a gradient.
        chosen: (tokens, k) int64.
        gate: (experts, ffn, hidden), or None where the activation has no gate.
        up: (experts, ffn, hidden), maybe in a wider dtype than x, as the other two.
        down: (experts, hidden, ffn).

    Returns:
        (tokens, hidden).
    """
    masters = (up, down) if gate is None else (gate, up, down)
    return _ExpertFeedForward.apply(kind, x, weights, chosen, *masters)  # type: ignore[no-any-return]

"""The feed-forwards of experts as grouped products: each expert works on the tokens that chose it.

Three steps, each of use alone where experts or their widths are spread: tokens are sorted by expert
(``sort_by_expert``), each expert's products run on its rows (``products`` and ``products_backward``), and the
rows of a token are added up (``sum_choices``).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brigata.ops.activation import activation, activation_backward
from brigata.ops.products import slow_in_16_bits


class Sorted(NamedTuple):
    """T tokens with k choices each as R = T * k rows in the order of their experts.

    Attributes:
        choices: (R,) int64, the flat index token * k + choice of each row; rows of one expert keep its order.
        tokens: (R,) int64, the token of each row.
        places: (T, k) int64, the row of each choice.
        counts: rows of each expert.
    """

    choices: Tensor
    tokens: Tensor
    places: Tensor
    counts: list[int]


def sort_by_expert(chosen: Tensor, experts: int) -> Sorted:
    """Rows for ``chosen`` (T, k) int64, each below ``experts``."""
    flat = chosen.flatten()
    choices = flat.argsort(stable=True)
    places = torch.empty_like(choices)
    places[choices] = torch.arange(len(choices), device=choices.device)
    counts = torch.bincount(flat, minlength=experts).tolist()
    return Sorted(choices, choices // chosen.shape[1], places.view_as(chosen), counts)


def sum_choices(rows: Tensor, places: Tensor) -> Tensor:
    """The sum of each token's rows, in the order of its choices, in fp32 or better.

    rows (R, D), places (T, k) -> (T, D).
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows[places[:, 0]].to(wide)
    for choice in range(1, places.shape[1]):
        total += rows[places[:, choice]]
    return total.to(rows.dtype)


def products(
    kind: str, rows: Tensor, scale: Tensor, counts: list[int], ups: Sequence[Tensor], down: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """scale * down(activation(gate(row), up(row))), each row with its expert's weights.

    Args:
        kind: activation, as ``ModelSpec.mlp``.
        rows: (R, D), those of one expert together, in the order of the experts.
        scale: (R, 1), in rows' dtype.
        counts: rows of each expert, R in all.
        ups: (gate, up) or (up,), each (experts, F, D), in rows' dtype.
        down: (experts, D, F), likewise.

    Returns:
        (R, D), and what came before the activation, an (R, F) for each of ``ups``.
    """
    inner = [rows.new_empty(len(rows), down.shape[2]) for _ in ups]
    y = torch.empty_like(rows)
    for e, span in _spans(counts):
        for out, up in zip(inner, ups, strict=True):
            _put(out[span], rows[span], up[e].t())
        hidden = activation(kind, *(out[span] for out in inner))
        _put(y[span], hidden.mul_(scale[span]), down[e].t())
    return y, inner


def products_backward(
    kind: str,
    drows: Tensor,
    rows: Tensor,
    scale: Tensor,
    counts: list[int],
    inner: Sequence[Tensor],
    ups: Sequence[Tensor],
    down: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of ``products``; the activation is computed again from ``inner``.

    With d = drows @ down: scale gets the sum of d * hidden over F, what is before the activation gets its
    slope times scale * d. The other arguments are those of the forward.

    Args:
        drows: (R, D), the result's gradient.
        inner: what the forward returned second.
        dtype: of the weights' gradients.

    Returns:
        Gradients of rows (R, D), of scale (R,) in fp32 or better, and of ``ups`` and ``down``; 0 for experts
        without rows.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    dscale = torch.empty(len(rows), dtype=wide, device=rows.device)
    dx = torch.empty_like(rows)
    dups = [torch.empty(up.shape, dtype=dtype, device=up.device) for up in ups]
    ddown = torch.empty(down.shape, dtype=dtype, device=down.device)
    for e, count in enumerate(counts):
        if not count:
            for gradient in (*dups, ddown):
                gradient[e].zero_()
    for e, span in _spans(counts):
        before = [part[span] for part in inner]
        hidden = activation(kind, *before)
        dhidden = torch.empty_like(hidden)
        _put(dhidden, drows[span], down[e])
        dscale[span] = (dhidden * hidden).sum(1, dtype=wide)
        _put(ddown[e], drows[span].t(), hidden.mul_(scale[span]))
        dbefore = activation_backward(kind, dhidden.mul_(scale[span]), *before)
        for i, (gradient, up) in enumerate(zip(dbefore, ups, strict=True)):
            _put(dups[i][e], gradient.t(), rows[span])
            _put(dx[span], gradient, up[e], add=i > 0)
    return dx, dscale, [*dups, ddown]


class _ExpertFeedForward(torch.autograd.Function):
    """Sum over a token's experts of weight * down(activation(gate(x), up(x))); no token is dropped.

    T tokens, k experts each, R = T * k rows in the order of their experts, F the inner width::

        forward    X (T, D)  -> rows (R, D)   -> G, U (R, F), kept -> A -> Y (R, D) -> summed (T, D)
        backward   dY rows @ down = d (R, F): weights get sum(d * A), A gets weight * d; A is computed again

    Rows of one expert are neighbours, so every product is a plain one. Sums over a token's experts run in the
    order in which it chose them. Kept are X, not its rows, and the weights as they came, not as cast.
    """

    @staticmethod
    def forward(ctx: Any, kind: str, x: Tensor, weights: Tensor, chosen: Tensor, *masters: Tensor) -> Tensor:
        *ups, down = (master.to(x.dtype) for master in masters)
        order = sort_by_expert(chosen, len(down))
        scale = weights.flatten()[order.choices, None].to(x.dtype)
        y, inner = products(kind, x[order.tokens], scale, order.counts, ups, down)
        ctx.save_for_backward(x, weights, *order[:3], *inner, *masters)
        ctx.kind, ctx.counts = kind, order.counts
        return sum_choices(y, order.places)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, choices, tokens, places, *saved = ctx.saved_tensors
        number = len(saved) // 2
        inner, masters = saved[:number], saved[number:]
        *ups, down = (master.to(x.dtype) for master in masters)
        scale = weights.flatten()[choices, None].to(x.dtype)
        dx, dscale, dmasters = products_backward(
            ctx.kind, dy[tokens], x[tokens], scale, ctx.counts, inner, ups, down, masters[-1].dtype
        )
        dweights = dscale[places].to(weights.dtype)
        return None, sum_choices(dx, places), dweights, None, *dmasters


def _spans(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, with its rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _put(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> None:
    """out = a @ b, or out += a @ b, in out's dtype; 16 bits as fp32 where that is faster."""
    if slow_in_16_bits(a):
        a, b = a.float(), b.float()
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif add:
        out += a @ b
    else:
        out.copy_(a @ b)


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

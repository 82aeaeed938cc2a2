"""Mamba-2's scan inside chunks: blocks of chunks as batched matrix products, forward and backward.

Shapes: b sequences, c chunks of Q tokens, H heads of P channels in G groups of J = H / G, N the state.
Products run in the dtype of x, or in fp32 where that is faster; decays, step sizes and states are fp32 or
better. With X = dt * x, per chunk and head::

    Y_i = sum over j <= i of (C_i . B_j) exp(cum_i - cum_j) X_j + exp(cum_i) C_i h
    h'  = exp(cum_Q) h + sum over j of exp(cum_Q - cum_j) X_j B_j^T

where cum is the running sum of dt * A inside the chunk: no sum runs further, whatever the sequence's length.
Source: Dao and Gu, arXiv 2405.21060, section 6; the backward is ours.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from brigata.ops.products import slow_in_16_bits


@dataclass(frozen=True)
class Block:
    """Neighbouring chunks of all sequences, cut out and laid out for products.

    Attributes:
        x: (b, c, H, Q, P), times the step sizes.
        b, c: (b, c, G, Q, N).
        cum: (b, c, H, Q), running sums of dt * A.
        same: (b, c, 1, Q, Q) bool, whether two tokens are of one document; None: all are.
        entering: (b, c, 1, Q) whether a token is of the document in which the chunk was entered, or None.
        leaving: (b, c, 1, Q) whether it is of the document in which the chunk is left, or None.
    """

    x: Tensor
    b: Tensor
    c: Tensor
    cum: Tensor
    same: Tensor | None
    entering: Tensor | None
    leaving: Tensor | None

    def from_start(self) -> Tensor:
        """exp(cum_i), or 0 in a document that begins in the chunk: (b, c, H, Q)."""
        decay = self.cum.exp()
        return decay if self.entering is None else decay * self.entering

    def to_end(self) -> Tensor:
        """exp(cum_Q - cum_j), or 0 in a document that ends in the chunk: (b, c, H, Q)."""
        decay = (self.cum[..., -1:] - self.cum).exp()
        return decay if self.leaving is None else decay * self.leaving

    def across(self) -> Tensor:
        """What is left of an entering state at the chunk's end: (b, c, H)."""
        return self.from_start()[..., -1]

    def between(self) -> Tensor:
        """exp(cum_i - cum_j) for j <= i of one document, else 0: (b, c, H, Q, Q)."""
        decay = (self.cum[..., :, None] - self.cum[..., None, :]).clamp_(max=0).exp_().tril_()
        return decay if self.same is None else decay.mul_(self.same)


def cut_block(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, segments: Tensor | None, span: slice, chunk: int
) -> Block:
    """Lay out the tokens of ``span``, a whole number of chunks, in the dtype in which products are fastest.

    x (b, l, H, P), dt (b, l, H), a (H,), b and c (b, l, G, N), segments (b, l) int64 or None.
    """
    dtype = torch.float32 if slow_in_16_bits(x) else x.dtype
    step = _chunked(dt[:, span], chunk).transpose(2, 3)
    scaled = _chunked(x[:, span], chunk).transpose(2, 3).to(dtype) * step.to(dtype)[..., None]
    cum = (step * a[:, None]).cumsum(-1)
    same = entering = leaving = None
    if segments is not None:
        first = span.start
        here = _chunked(segments[:, span], chunk)
        before = torch.cat([segments[:, max(first - 1, 0), None], here[:, :-1, -1]], 1)
        same = (here[..., :, None] == here[..., None, :])[:, :, None]
        entering = (here == before[..., None])[:, :, None]
        leaving = (here == here[..., -1:])[:, :, None]
    turned = (_chunked(t[:, span], chunk).transpose(2, 3).to(dtype) for t in (b, c))
    return Block(scaled, *turned, cum, same, entering, leaving)


def _chunked(x: Tensor, chunk: int) -> Tensor:
    return x.unflatten(1, (-1, chunk))


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(b, c, H, ...) -> (b, c, G, J, ...)."""
    return x.unflatten(2, (groups, -1))


def scores(block: Block, between: Tensor) -> Tensor:
    """(C_i . B_j) exp(cum_i - cum_j) of every head, in the products' dtype: (b, c, H, Q, Q)."""
    groups = block.b.shape[2]
    similar = block.c @ block.b.transpose(-1, -2)
    return (_by_group(between, groups) * similar[:, :, :, None]).flatten(2, 3).to(block.x.dtype)


def chunk_states(block: Block) -> Tensor:
    """What each chunk adds to the state: (b, c, H, P, N) in the decays' dtype."""
    groups = block.b.shape[2]
    weighted = block.x * block.to_end().to(block.x.dtype)[..., None]
    added = _by_group(weighted, groups).transpose(-1, -2).flatten(3, 4) @ block.b
    return added.unflatten(3, (-1, block.x.shape[-1])).flatten(2, 3).to(block.cum.dtype)


def outputs(block: Block, entered: Tensor) -> Tensor:
    """Y, from the states (b, c, H, P, N) in which chunks are entered: (b, c, Q, H, P)."""
    inside = scores(block, block.between()) @ block.x
    carried = _carried(block, entered) * block.from_start().to(block.x.dtype).transpose(2, 3)[..., None]
    return carried.add_(inside.transpose(2, 3))


def _carried(block: Block, entered: Tensor) -> Tensor:
    """C_i h of every head: (b, c, Q, H, P)."""
    groups = block.b.shape[2]
    states = _by_group(entered.to(block.x.dtype), groups).flatten(3, 4)
    product = block.c @ states.transpose(-1, -2)
    return product.unflatten(-1, (-1, entered.shape[-2])).transpose(2, 3).flatten(3, 4)


@dataclass(frozen=True)
class BlockGradients:
    """Gradients of a block: x (b, c, H, Q, P), b and c (b, c, G, Q, N), cum (b, c, H, Q)."""

    x: Tensor
    b: Tensor
    c: Tensor
    cum: Tensor


def state_gradients(block: Block, dy: Tensor) -> Tensor:
    """What each chunk's own outputs give the state in which it was entered: (b, c, H, P, N).

    dy (b, c, H, Q, P).
    """
    groups = block.b.shape[2]
    weighted = dy * block.from_start().to(dy.dtype)[..., None]
    given = _by_group(weighted, groups).transpose(-1, -2).flatten(3, 4) @ block.c
    return given.unflatten(3, (-1, dy.shape[-1])).flatten(2, 3).to(block.cum.dtype)


def block_gradients(block: Block, dy: Tensor, entered: Tensor, dleft: Tensor) -> BlockGradients:
    """Everything but the states' own recurrence.

    Args:
        block: laid out as for the forward.
        dy: gradient of Y, (b, c, H, Q, P).
        entered: states in which chunks were entered, (b, c, H, P, N).
        dleft: gradients of the states in which they were left, likewise.
    """
    groups, dtype, wide = block.b.shape[2], block.x.dtype, block.cum.dtype
    between = block.between()
    mixed = scores(block, between)
    dmixed = dy @ block.x.transpose(-1, -2)
    dx = mixed.transpose(-1, -2) @ dy
    dsimilar = _by_group(between.mul_(dmixed), groups).sum(3).to(dtype)
    dc = dsimilar @ block.b
    db = dsimilar.transpose(-1, -2) @ block.c
    # decays inside the chunk: what row i gains in cum_i, column j loses in cum_j
    gained = dmixed.to(wide).mul_(mixed)
    dcum = gained.sum(-1).sub_(gained.sum(-2))
    # the entered state, read by every token
    from_start = block.from_start()
    read = _carried(block, entered).transpose(2, 3)
    dcum += (dy.to(wide) * read).sum(-1).mul_(from_start)
    dread = _by_group(dy * from_start.to(dtype)[..., None], groups)
    states = _by_group(entered.to(dtype), groups)
    dc += dread.transpose(3, 4).flatten(4) @ states.flatten(3, 4)
    # the state that is left, written by every token
    to_end = block.to_end()
    dstates = _by_group(dleft.to(dtype), groups)
    dwritten = (block.b @ dstates.flatten(3, 4).transpose(-1, -2)).unflatten(-1, (-1, dy.shape[-1]))
    dwritten = dwritten.transpose(3, 4).flatten(2, 3) * to_end.to(dtype)[..., None]
    moved = (block.x.to(wide) * dwritten).sum(-1)
    dcum -= moved
    across = (entered * dleft).sum((-1, -2)) * from_start[..., -1]
    dcum[..., -1] += moved.sum(-1) + across
    written = _by_group(block.x * to_end.to(dtype)[..., None], groups)
    db += written.transpose(3, 4).flatten(4) @ dstates.flatten(3, 4)
    return BlockGradients(dx.add_(dwritten), db, dc, dcum)

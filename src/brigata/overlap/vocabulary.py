"""Embedding and cross-entropy over a vocabulary that is cut over the group.

Rank r holds rows ``first .. first + V/n`` of the table. The head's product is ``all_gather_linear``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brigata.overlap.auto import Work
from brigata.overlap.channel import Channel
from brigata.overlap.executor import allocate, execute
from brigata.overlap.tokens import gather_tokens
from brigata.schedule.build import OUTPUT, WEIGHT_GRADIENT
from brigata.schedule.chunks import split_evenly


class _VocabularyEmbedding(torch.autograd.Function):
    """Look up all T tokens in this rank's rows, and sum over ranks, each chunk of tokens at its owner.

    Per rank, n ranks::

        forward    tokens (T,)           W (V/n, D)  -> H (T/n, D)   own chunk last; one term a sum is not 0
        backward   dH (T/n, D) gathered, tokens      -> dW (V/n, D)  added as chunks arrive, in a fixed order

    The backward is never deferred: it is W alone, nobody waits for it, and it costs additions of T rows.
    """

    @staticmethod
    def forward(
        ctx: Any, master: Tensor, tokens: Tensor, first: int, dtype: torch.dtype, channel: Channel,
        rows: Sequence[int],
    ) -> Tensor:  # fmt: skip
        work = Work(0.0, master.shape[1], dtype.itemsize)
        plan = channel.prepare("vocabulary_embedding.forward", rows, work)
        chunks = plan.chunks
        h = master.new_empty(chunks.rows[channel.rank], master.shape[1], dtype=dtype)
        table = master.to(dtype)
        local = tokens - first
        here = (local >= 0) & (local < len(table))
        local = local.clamp(0, len(table) - 1)

        def output(span: slice, out: Tensor | None) -> None:
            assert out is not None
            torch.index_select(table, 0, local[span], out=out)
            out.masked_fill_(~here[span, None], 0)

        memory = allocate(plan, table.shape[1], h, None, h)
        execute(channel, "vocabulary_embedding.forward", plan, memory, {OUTPUT: output})
        ctx.save_for_backward(local, here)
        ctx.channel, ctx.rows, ctx.work, ctx.master = channel, rows, work, master
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        channel, master = ctx.channel, ctx.master
        plan = channel.prepare("vocabulary_embedding.backward", ctx.rows, ctx.work)
        chunks = plan.chunks
        local, here = ctx.saved_tensors
        (dh,) = grads
        gathered = dh.new_empty(chunks.tokens, dh.shape[1])
        gathered[chunks.chunk_span(channel.rank)] = dh
        dw = torch.zeros_like(master)

        def weight_gradient(span: slice, _: Tensor | None) -> None:
            mine = here[span]
            dw.index_add_(0, local[span][mine], gathered[span][mine].to(dw.dtype))

        memory = allocate(plan, dh.shape[1], dh, gathered, None)
        execute(channel, "vocabulary_embedding.backward", plan, memory, {WEIGHT_GRADIENT: weight_gradient})
        return dw, None, None, None, None, None


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Sum over tokens of the negative log-likelihood, from logits cut over the vocabulary.

    Per rank, T tokens, n ranks::

        forward    logits (T, V/n)  -> maximum, sum of exponentials, target's logit: (T, 3), exchanged
                   (n, T, 3)        -> loss, a scalar, the same on every rank
        backward   softmax - one-hot, here only
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, ignored: int, channel: Channel
    ) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        local = targets - first
        here = (local >= 0) & (local < wide.shape[1])
        index = local.clamp(0, wide.shape[1] - 1)[:, None]
        highest = wide.amax(1)
        total = (wide - highest[:, None]).exp_().sum(1)
        target = wide.gather(1, index)[:, 0].masked_fill(~here, 0)
        statistics = torch.stack([highest, total, target], 1)
        everyone = gather_tokens(statistics, channel).view(channel.size, *statistics.shape)
        highest = everyone[:, :, 0].amax(0)
        total = (everyone[:, :, 1] * (everyone[:, :, 0] - highest).exp()).sum(0)
        normaliser = highest + total.log()
        counts = targets != ignored
        loss = (normaliser - everyone[:, :, 2].sum(0)).masked_fill(~counts, 0).sum()
        ctx.save_for_backward(logits, normaliser, index, here & counts, counts)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, normaliser, index, here, counts = ctx.saved_tensors
        probability = (logits - normaliser[:, None]).exp_()
        probability.scatter_add_(1, index, -here[:, None].to(probability.dtype))
        probability.mul_((grads[0] * counts)[:, None])
        return probability.to(logits.dtype), None, None, None, None


def vocabulary_embedding(
    weight: Tensor,
    tokens: Tensor,
    first: int,
    dtype: torch.dtype,
    channel: Channel,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Embed ``tokens`` with a table cut over the group.

    Args:
        weight: this rank's rows of the table, (V / n, D).
        tokens: all tokens, (T,) int64, the same on every rank.
        first: the token of ``weight``'s first row.
        dtype: of the result and of the messages.
        channel: the group and its order.
        rows: tokens that each rank gets; default: as even as whole rows allow.

    Returns:
        (rows of this rank, D).
    """
    rows = split_evenly(len(tokens), channel.size) if rows is None else rows
    return _VocabularyEmbedding.apply(weight, tokens, first, dtype, channel, tuple(rows))  # type: ignore[no-any-return]


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, first: int, ignored: int, channel: Channel
) -> Tensor:
    """Sum of the tokens' losses (nats) from this rank's logits (T, V / n); ``targets`` (T,) are global ids.

    Targets equal to ``ignored`` do not count. Computed in fp32 or better; the result is the same on every
    rank.
    """
    return _VocabularyCrossEntropy.apply(logits, targets, first, ignored, channel)  # type: ignore[no-any-return]

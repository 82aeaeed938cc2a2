"""Embedding and cross-entropy over a cut vocabulary equal the whole ones, ignored targets included."""

import pytest
import torch
import torch.nn.functional as F

from brigata.ops.loss import IGNORED, cross_entropy_sum
from brigata.overlap.vocabulary import vocabulary_cross_entropy, vocabulary_embedding
from pool import Pool
from test_linear import channel_for, whole

TOKENS, VOCAB, HIDDEN = 20, 24, 6


def embedding(order: str) -> None:
    channel = channel_for(order)
    n, me = channel.size, channel.rank
    table = whole(1, VOCAB, HIDDEN).requires_grad_()
    tokens = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(2))
    dh = whole(3, TOKENS, HIDDEN)
    h = F.embedding(tokens, table)
    h.backward(dh)
    share = table.detach().chunk(n)[me].clone().requires_grad_()
    mine = vocabulary_embedding(share, tokens, me * VOCAB // n, torch.float64, channel)
    mine.backward(dh.chunk(n)[me])
    torch.testing.assert_close(mine, h.chunk(n)[me], rtol=0, atol=0)
    torch.testing.assert_close(share.grad, table.grad.chunk(n)[me], rtol=1e-13, atol=1e-13)


def cross_entropy(order: str, scale: float) -> None:
    channel = channel_for(order)
    n, me = channel.size, channel.rank
    logits = (scale * whole(1, TOKENS, VOCAB)).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(2))
    targets[::5] = IGNORED
    loss = cross_entropy_sum(logits, targets)
    (loss / 7).backward()
    share = logits.detach().chunk(n, 1)[me].clone().requires_grad_()
    mine = vocabulary_cross_entropy(share, targets, me * VOCAB // n, IGNORED, channel)
    (mine / 7).backward()
    torch.testing.assert_close(mine, loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(share.grad, logits.grad.chunk(n, 1)[me], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("order", ["blocking", "blocking_p2p", "sliced:2", "ring", "direct:2"])
@pytest.mark.parametrize("world", [2, 4])
def test_vocabulary_operators_equal_one_process(pool: Pool, world: int, order: str) -> None:
    pool.run(world, embedding, order)
    pool.run(world, cross_entropy, order, 1.0)
    pool.run(
        world, cross_entropy, order, 300.0
    )  # exponentials that would overflow without the common maximum

"""Plain tensor parallelism, in every order, equals the plain product: outputs, input and weight gradients."""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from brigata.describe.order import parse_order
from brigata.overlap.all_reduce import column_linear, linear_all_reduce
from brigata.overlap.channel import Channel
from pool import Pool

ORDERS = ["blocking", "blocking_p2p", "sliced:4", "ring", "direct", "ring:3", "direct:2", "bidirectional"]
TOKENS = [12, 7, 3, 1]
"""Even, uneven, and so few that some ranks have nothing to sum."""


def channel_for(order: str, delays: bool = False) -> Channel:
    generator = random.Random(dist.get_rank())

    def pause(step: Any) -> None:
        time.sleep(generator.random() * 0.004)

    group = dist.group.WORLD
    assert group is not None
    before_step = pause if delays else None
    return Channel(group, torch.device("cpu"), parse_order(order), before_step=before_step, proven=True)


def whole(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory that is not contiguous."""
    return torch.stack([x, x], -1)[..., 0]


def row(order: str, tokens: int, delays: bool = False) -> dict[str, torch.Tensor]:
    """After comparing with one process: what is whole here, and what is a share."""
    channel = channel_for(order, delays)
    n, me = channel.size, channel.rank
    x_all, w_all, dy = whole(1, tokens, 4 * n), whole(2, 10, 4 * n), whole(3, tokens, 10)
    for tensor in (x_all, w_all):
        tensor.requires_grad_()
    (x_all @ w_all.T).backward(dy)

    x = strided(x_all.detach().chunk(n, 1)[me]).requires_grad_()
    w = strided(w_all.detach().chunk(n, 1)[me]).requires_grad_()
    y = linear_all_reduce(x, w, channel)
    y.backward(strided(dy))
    close(y, x_all @ w_all.T)
    close(x.grad, x_all.grad.chunk(n, 1)[me])
    close(w.grad, w_all.grad.chunk(n, 1)[me])
    return {"whole": y.detach(), "share": x.grad, "weight": w.grad}


def column(order: str, tokens: int, delays: bool = False) -> dict[str, torch.Tensor]:
    channel = channel_for(order, delays)
    n, me = channel.size, channel.rank
    x_all, w1, w2 = whole(1, tokens, 10), whole(2, 4 * n, 10), whole(3, 2 * n, 10)
    dy1, dy2 = whole(4, tokens, 4 * n), whole(5, tokens, 2 * n)
    for tensor in (x_all, w1, w2):
        tensor.requires_grad_()
    torch.autograd.backward([x_all @ w1.T, x_all @ w2.T], [dy1, dy2])

    x = strided(x_all.detach()).requires_grad_()
    shares = [strided(w.detach().chunk(n)[me]).requires_grad_() for w in (w1, w2)]
    y1, y2 = column_linear(x, shares, channel)
    torch.autograd.backward([y1, y2], [strided(dy.chunk(n, 1)[me]) for dy in (dy1, dy2)])
    close(y1, (x_all @ w1.T).chunk(n, 1)[me])
    close(y2, (x_all @ w2.T).chunk(n, 1)[me])
    close(x.grad, x_all.grad)
    for share, w in zip(shares, (w1, w2), strict=True):
        close(share.grad, w.grad.chunk(n)[me])
    return {"whole": x.grad, "share": y1.detach(), "weight": shares[0].grad}


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def counted(order: str) -> dict[str, int]:
    """How often each pass computed something while messages travelled."""
    channel = channel_for(order)
    x, w = whole(1, 8, 6).requires_grad_(), whole(2, 6, 6).requires_grad_()
    (y,) = column_linear(x, [w], channel)
    linear_all_reduce(y, w, channel).sum().backward()
    return {name: passes.overlapped_calls for name, passes in channel.evidence.take().items()}


def frozen(order: str) -> tuple[bool, bool]:
    channel = channel_for(order)
    x, w = whole(1, 8, 6).requires_grad_(), whole(2, 6, 6)
    (y,) = column_linear(x, [w], channel)
    linear_all_reduce(y, w, channel).sum().backward()
    return x.grad is not None, w.grad is None


def mixed(order: str) -> None:
    """fp32 weights under bf16 products get fp32 gradients."""
    channel = channel_for(order)
    x = whole(1, 8, 6).bfloat16().requires_grad_()
    w = whole(2, 6, 6).float().requires_grad_()
    (y,) = column_linear(x, [w], channel)
    z = linear_all_reduce(y, w, channel)
    z.sum().backward()
    assert (z.dtype, x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    expected = channel.size * (x.float() @ w.T @ w.T)
    torch.testing.assert_close(z.float(), expected, rtol=0.1, atol=0.5)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world", [2, 4])
def test_plain_operators_equal_one_process(pool: Pool, world: int, order: str, tokens: int) -> None:
    for operator in (row, column):
        first, *others = pool.run(world, operator, order, tokens)
        assert all(torch.equal(first["whole"], other["whole"]) for other in others)


@pytest.mark.parametrize("order", ["hierarchical:2", "userbuffers", "async_tp"])
def test_plain_operators_equal_one_process_on_four(pool: Pool, order: str) -> None:
    for operator in (row, column):
        pool.run(4, operator, order, 13)


@pytest.mark.parametrize("order", ["sliced:4", "ring", "direct:2"])
def test_delays_change_nothing(pool: Pool, order: str) -> None:
    for operator in (row, column):
        calm = pool.run(4, operator, order, 11)
        hectic = pool.run(4, operator, order, 11, True)
        for before, after in zip(calm, hectic, strict=True):
            assert all(torch.equal(before[key], after[key]) for key in before)


def test_only_what_sends_counts_as_overlapped(pool: Pool) -> None:
    for counts in pool.run(2, counted, "direct:2"):
        assert counts == {
            "column_all_reduce.forward": 0,
            "linear_all_reduce.forward": 1,
            "linear_all_reduce.backward": 0,
            "column_all_reduce.backward": 1,
        }


def test_frozen_weights_get_no_gradient(pool: Pool) -> None:
    assert pool.run(2, frozen, "direct") == [(True, True)] * 2


def test_wide_weights_get_wide_gradients(pool: Pool) -> None:
    pool.run(2, mixed, "direct:2")

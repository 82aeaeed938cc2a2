"""Every linear operator, in every order, equals the plain product: outputs, input and weight gradients."""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from brigata.describe.order import parse_order
from brigata.overlap.channel import Channel
from brigata.overlap.linear import all_gather_linear, linear_reduce_scatter
from pool import Pool

ORDERS = ["blocking", "blocking_p2p", "sliced:4", "ring", "direct", "ring:3", "direct:2"]
ORDERS += [
    "bidirectional",
    "bidirectional:4",
    "hierarchical:2",
    "hierarchical:2:2",
    "userbuffers",
    "async_tp",
]
ORDERS += ["ring@fp32"]
CUTS = {
    "even": lambda n: [6] * n,
    "uneven": lambda n: [3 + 2 * r for r in range(n)],
    "empty": lambda n: [0] + [5] * (n - 1),
}


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


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory that is not contiguous."""
    return torch.stack([x, x], -1)[..., 0]


def _spans(rows: list[int]) -> list[slice]:
    ends = [sum(rows[: r + 1]) for r in range(len(rows))]
    return [slice(end - size, end) for end, size in zip(ends, rows, strict=True)]


def column(order: str, rows: list[int], keep: bool, delays: bool = False) -> list[torch.Tensor]:
    """Differences to one process, then this rank's output and gradients."""
    channel = channel_for(order, delays)
    n, me = channel.size, channel.rank
    x_all, w1, w2 = whole(1, sum(rows), 10), whole(2, 4 * n, 10), whole(3, 2 * n, 10)
    dy1, dy2 = whole(4, sum(rows), 4 * n), whole(5, sum(rows), 2 * n)
    for tensor in (x_all, w1, w2):
        tensor.requires_grad_()
    torch.autograd.backward([x_all @ w1.T, x_all @ w2.T], [dy1, dy2])

    mine = _spans(rows)[me]
    x = _strided(x_all.detach()[mine]).requires_grad_()
    shares = [w.detach().chunk(n)[me].clone().requires_grad_() for w in (w1, w2)]
    y1, y2 = all_gather_linear(x, shares, channel, rows, keep_gathered=keep)
    dy1_mine, dy2_mine = (_strided(dy.chunk(n, 1)[me]) for dy in (dy1, dy2))
    torch.autograd.backward([y1, y2], [dy1_mine, dy2_mine])
    expected = [(x_all @ w1.T).chunk(n, 1)[me], (x_all @ w2.T).chunk(n, 1)[me], x_all.grad[mine]]
    expected += [w1.grad.chunk(n)[me], w2.grad.chunk(n)[me]]
    return _compare([y1, y2, x.grad, shares[0].grad, shares[1].grad], expected)


def row(order: str, rows: list[int], keep: bool, delays: bool = False) -> list[torch.Tensor]:
    channel = channel_for(order, delays)
    n, me = channel.size, channel.rank
    x_all, w_all = whole(1, sum(rows), 4 * n), whole(2, 10, 4 * n)
    dy = whole(3, sum(rows), 10)
    for tensor in (x_all, w_all):
        tensor.requires_grad_()
    (x_all @ w_all.T).backward(dy)

    mine = _spans(rows)[me]
    x = _strided(x_all.detach().chunk(n, 1)[me]).requires_grad_()
    w = w_all.detach().chunk(n, 1)[me].clone().requires_grad_()
    y = linear_reduce_scatter(x, w, channel, rows)
    y.backward(_strided(dy[mine]))
    expected = [(x_all @ w_all.T)[mine], x_all.grad.chunk(n, 1)[me], w_all.grad.chunk(n, 1)[me]]
    return _compare([y, x.grad, w.grad], expected)


def _compare(actual: list[Any], expected: list[Any]) -> list[torch.Tensor]:
    for mine, whole in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)
    return [tensor.detach().clone() for tensor in actual]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world", [2, 4])
def test_linear_operators_equal_one_process(pool: Pool, world: int, order: str, cut: str) -> None:
    rows = CUTS[cut](world)
    pool.run(world, column, order, rows, True)
    pool.run(world, column, order, rows, False)
    pool.run(world, row, order, rows, True)


@pytest.mark.parametrize("order", ORDERS)
def test_delays_change_nothing(pool: Pool, order: str) -> None:
    for operator in (column, row):
        calm = pool.run(4, operator, order, [5, 3, 4, 6], True)
        hectic = pool.run(4, operator, order, [5, 3, 4, 6], True, True)
        for before, after in zip(calm, hectic, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

"""Bounded stress of the overlap engine: ``make stress``. Not part of ``make test``; about three minutes.

Random shapes, groups, orders, dtypes, strides and per-rank delays; many calls; several operators in one
backward. Whatever is slow must be bitwise what is quick, nothing may leak, and counts must be exact.
"""

import gc
import os
import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from brigata.describe.order import parse_order
from brigata.overlap.channel import Channel
from brigata.overlap.linear import all_gather_linear, linear_reduce_scatter
from pool import Pool

KINDS = ["blocking", "blocking_p2p", "sliced:2", "sliced:5", "ring", "ring:2", "direct", "direct:3"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.06}


def _delay(seed: int) -> Any:
    generator = random.Random(f"{seed}/{dist.get_rank()}")

    def pause(_: Any) -> None:
        if generator.random() < 0.3:
            time.sleep(generator.random() * 0.003)

    return pause


def _block(
    channel: Channel, rows: list[int], widths: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """Two branches of column- and row-parallel products that share an input and one backward."""
    n, me = channel.size, channel.rank
    hidden, first, second = widths
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x_all, dy_all = draw(sum(rows), hidden), draw(sum(rows), hidden)
    columns = [draw(first * n, hidden), draw(first * n, hidden), draw(second * n, hidden)]
    backs = [draw(hidden, first * n), draw(hidden, second * n)]
    start = sum(rows[:me])
    mine = slice(start, start + rows[me])
    x = torch.stack([x_all[mine]] * 2, -1).to(dtype)[..., 0].requires_grad_()
    ins = [w.chunk(n)[me].to(dtype).requires_grad_() for w in columns]
    outs = [w.chunk(n, 1)[me].to(dtype).requires_grad_() for w in backs]
    a, b = all_gather_linear(x, ins[:2], channel, rows, keep_gathered=seed % 2 == 0)
    (c,) = all_gather_linear(x, ins[2:], channel, rows)
    y = linear_reduce_scatter(a * b, outs[0], channel, rows) + linear_reduce_scatter(
        c, outs[1], channel, rows
    )
    y.backward(dy_all[mine].to(dtype))
    results = [y, x.grad, *(w.grad for w in ins), *(w.grad for w in outs)]
    exact, rounded = (_alone(x_all, columns, backs, dy_all, kind) for kind in (torch.float64, dtype))
    cut = [mine, mine, *(slice(None) for _ in range(5))]
    for i, result in enumerate(results):
        wanted, alone = (
            whole[i][cut[i]] if i < 2 else whole[i].chunk(n, 0 if i < 5 else 1)[me]
            for whole in (exact, rounded)
        )
        error, unavoidable = ((t.double() - wanted).norm() / (wanted.norm() + 1e-30) for t in (result, alone))
        limit = 4 * unavoidable + TOLERANCE[dtype]
        assert error <= limit, f"tensor {i}: relative error {error:.1e}, one process has {unavoidable:.1e}"
    return [result.detach().clone() for result in results]


def _alone(
    x: torch.Tensor,
    columns: list[torch.Tensor],
    backs: list[torch.Tensor],
    dy: torch.Tensor,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """The same block in one process and ``dtype``: output, then the gradients of all inputs."""
    x, *weights = (tensor.detach().to(dtype).requires_grad_() for tensor in (x, *columns, *backs))
    y = ((x @ weights[0].T) * (x @ weights[1].T)) @ weights[3].T + (x @ weights[2].T) @ weights[4].T
    return [y.detach(), *torch.autograd.grad(y, (x, *weights), dy.to(dtype))]


def random_blocks(seed: int, rounds: int) -> None:
    generator = random.Random(f"{seed}/{dist.get_world_size()}")
    group = dist.group.WORLD
    assert group is not None
    for number in range(rounds):
        order = parse_order(generator.choice(KINDS))
        rows = [generator.randint(0, 9) for _ in range(dist.get_world_size())]
        rows[0] += 1
        widths = (generator.randint(1, 24), generator.randint(1, 24), generator.randint(1, 24))
        dtype = generator.choice(list(TOLERANCE))
        quick, slow = (
            _block(
                Channel(group, torch.device("cpu"), order, before_step=delay, proven=True),
                rows, widths, dtype, number,
            )
            for delay in (None, _delay(number))
        )  # fmt: skip
        for fast, late in zip(quick, slow, strict=True):
            assert torch.equal(fast, late), f"round {number}: {order}, {rows}, {dtype}"


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_random_blocks_are_right_and_bitwise_independent_of_delays(pool: Pool, world: int, seed: int) -> None:
    pool.run(world, random_blocks, seed, 25)


def many_calls(calls: int) -> dict[str, list[int]]:
    """Open files, threads, tensors and resident pages after a warm-up and after ``calls`` more calls."""
    group = dist.group.WORLD
    assert group is not None
    channels = [Channel(group, torch.device("cpu"), parse_order(kind)) for kind in KINDS]
    x = torch.randn(8, 16, requires_grad=True)
    w_in, w_out = torch.randn(12, 16, requires_grad=True), torch.randn(16, 12, requires_grad=True)

    def call(channel: Channel) -> None:
        (y,) = all_gather_linear(x, [w_in], channel)
        linear_reduce_scatter(y, w_out, channel).sum().backward()

    counts: dict[str, list[int]] = {"files": [], "threads": [], "tensors": [], "pages": []}
    for amount in (400, calls):
        for i in range(amount):
            call(channels[i % len(channels)])
        for leaf in (x, w_in, w_out):
            leaf.grad = None
        for channel in channels:
            channel.evidence.take()
        gc.collect()
        counts["files"].append(len(os.listdir("/proc/self/fd")))
        counts["threads"].append(threading.active_count())
        counts["tensors"].append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
        with open("/proc/self/statm", encoding="ascii") as statm:
            counts["pages"].append(int(statm.read().split()[1]))
    return counts


def test_ten_thousand_calls_leak_nothing(pool: Pool) -> None:
    for counts in pool.run(2, many_calls, 2_500, timeout=300):  # four operator passes a call
        for what in ("files", "threads", "tensors"):
            before, after = counts[what]
            assert after <= before, f"{what}: {before} before, {after} after"
        before, after = counts["pages"]
        assert after - before < 1_000, f"resident memory grew by {(after - before) * 4} KiB"


def counted_block(kind: str) -> dict[str, tuple[int, int, int]]:
    group = dist.group.WORLD
    assert group is not None
    channel = Channel(group, torch.device("cpu"), parse_order(kind))
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(12, 16, requires_grad=True)
    (y,) = all_gather_linear(x, [w], channel)
    back = torch.randn(16, 12, requires_grad=True)
    linear_reduce_scatter(y, back, channel).sum().backward()
    taken = channel.evidence.take()
    return {name: (seen.messages, seen.products, seen.bytes_sent) for name, seen in taken.items()}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "direct"])
def test_counts_are_exact(pool: Pool, world: int, kind: str) -> None:
    hops, sent = world - 1, (world - 1) * 8 * 16 * 4
    for seen in pool.run(world, counted_block, kind):
        assert seen == {
            "all_gather_linear.forward": (hops, world, sent),
            "linear_reduce_scatter.forward": (hops, world, sent),
            "linear_reduce_scatter.backward": (hops, 2 * world, sent),
            "all_gather_linear.backward_kept": (hops, world + max(world - 1, 1), sent),
        }

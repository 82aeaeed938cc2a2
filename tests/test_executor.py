"""Programs do what they say when they are executed: over gloo, and in larger groups between threads."""

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from brigata.describe.order import parse_order
from brigata.overlap.channel import Channel
from brigata.overlap.evidence import Evidence
from brigata.overlap.executor import allocate, execute
from brigata.overlap.plan import bind
from brigata.schedule.build import INPUT_GRADIENT, OUTPUT, WEIGHT_GRADIENT, build_program
from brigata.schedule.chunks import Chunks, Pairs
from pool import Pool

WIDTH = 3
ORDERS = ["blocking_p2p", "sliced:3", "ring", "ring:2", "direct:2", "bidirectional", "hierarchical:1",
          "hierarchical:2", "hierarchical:2:2", "userbuffers", "ring@fp32", "direct@fp32"]  # fmt: skip
PAIR_ORDERS = ["blocking_p2p", "sliced:2", "direct", "direct:3"]
WITH_BACKEND = ["blocking", "async_tp"]
"""Orders that need collectives or barriers, so that no queue will do."""


class Post:
    """Mail between the threads of one test: the k-th receive from a rank gets its k-th message."""

    def __init__(self) -> None:
        self.arrived = threading.Condition()
        self.mail: dict[tuple[int, int], list[Tensor]] = defaultdict(list)

    def channel(self, rank: int) -> Any:
        expected: dict[int, int] = defaultdict(int)

        def post(messages: list[tuple[bool, Tensor, int]]) -> list[Any]:
            works = []
            for outgoing, buffer, peer in messages:
                if outgoing:
                    with self.arrived:
                        self.mail[rank, peer].append(buffer.clone())
                        self.arrived.notify_all()
                    works.append(SimpleNamespace(wait=lambda: None))
                else:
                    works.append(SimpleNamespace(wait=self._delivery((peer, rank), expected[peer], buffer)))
                    expected[peer] += 1
            return works

        return SimpleNamespace(
            rank=rank,
            group=None,
            device=torch.device("cpu"),
            before_step=None,
            evidence=Evidence(),
            post=post,
        )

    def _delivery(self, way: tuple[int, int], turn: int, buffer: Tensor) -> Callable[[], None]:
        def wait() -> None:
            with self.arrived:
                assert self.arrived.wait_for(lambda: len(self.mail[way]) > turn, timeout=20), way
                buffer.copy_(self.mail[way][turn])

        return wait


def in_threads(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    post = Post()
    with ThreadPoolExecutor(ranks) as threads:
        futures = [threads.submit(function, post.channel(rank), *args) for rank in range(ranks)]
        return [future.result(timeout=60) for future in futures]


def over_gloo(function: Callable[..., Any], *args: Any) -> Any:
    group = dist.group.WORLD
    assert group is not None
    return function(Channel(group, torch.device("cpu"), parse_order("ring")), *args)


def values(seed: int, rows: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def reduced(channel: Any, operator: str, name: str, rows: list[int], dtype: torch.dtype) -> Tensor:
    """This rank's result of a pass that sums rank r's ``values(r)`` over all ranks."""
    order = parse_order(name)
    chunks = Chunks(tuple(rows), order.parts)
    plan = bind(build_program(operator, order, chunks, channel.rank), chunks)
    mine = values(channel.rank, chunks.tokens, dtype)
    result = torch.full_like(mine, torch.nan)
    own = torch.full_like(mine[: rows[channel.rank]], torch.nan)
    filled = torch.zeros(chunks.tokens)

    def contribution(tokens: slice, out: Tensor | None) -> None:
        assert out is not None
        assert out.dtype == dtype
        out.copy_(mine[tokens])

    def fill(tokens: slice, out: Tensor | None) -> None:
        filled[tokens] += 1

    products = {OUTPUT: contribution, INPUT_GRADIENT: contribution, WEIGHT_GRADIENT: fill}
    execute(channel, operator, plan, allocate(plan, WIDTH, mine, gathered=result, own=own), products)
    assert operator != "column_all_reduce.backward" or (filled == 1).all()
    return own if operator == "linear_reduce_scatter.forward" else result


def exchanged(channel: Any, operator: str, name: str, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """What this rank got in an all-to-all, and the rows on which a product after it was computed.

    Rank s has 100 s + 10 d + row for rank d; a product before adds 1000.
    """
    order, me = parse_order(name), channel.rank
    pairs = Pairs.of(rows, order.parts)
    plan = bind(build_program(operator, order, pairs, me), pairs)
    sent, got = pairs.rows_between(me)
    pieces = [100.0 * me + 10 * d + torch.arange(size).double() for d, size in enumerate(sent)]
    outgoing = torch.cat(pieces)[:, None].repeat(1, WIDTH)
    incoming = torch.full((sum(got), WIDTH), torch.nan, dtype=torch.float64)
    computed, own = torch.full_like(incoming, torch.nan), slice(sum(got[:me]), sum(got[: me + 1]))
    given = outgoing.clone()
    if operator == "all_to_all_linear.forward":
        incoming[own] = given[sum(sent[:me]) : sum(sent[: me + 1])]
    else:
        outgoing.fill_(torch.nan)

    def product(tokens: slice, out: Tensor | None) -> None:
        if out is None:
            computed[tokens] = incoming[tokens]
        else:
            out.copy_(given[tokens] + 1000)

    products = {OUTPUT: product, INPUT_GRADIENT: product, WEIGHT_GRADIENT: lambda tokens, out: None}
    memory = allocate(plan, WIDTH, outgoing, outgoing=outgoing, incoming=incoming)
    execute(channel, operator, plan, memory, products)
    return incoming, computed


def uneven(ranks: int) -> list[int]:
    return [(3 * r + 2) % 5 for r in range(ranks)]


def check_sums(operator: str, rows: list[int], results: list[Tensor]) -> None:
    expected = sum(values(rank, sum(rows), torch.float64) for rank in range(len(rows)))
    assert isinstance(expected, Tensor)
    for rank, result in enumerate(results):
        begin = sum(rows[:rank])
        scattered = operator == "linear_reduce_scatter.forward"
        part = expected[begin : begin + rows[rank]] if scattered else expected
        torch.testing.assert_close(result, part, rtol=1e-12, atol=1e-12)
        assert scattered or torch.equal(result, results[0])


def check_exchange(operator: str, rows: list[list[int]], results: list[tuple[Tensor, Tensor]]) -> None:
    made = 0 if operator == "all_to_all_linear.forward" else 1000
    for rank, (incoming, computed) in enumerate(results):
        sizes = [row[rank] for row in rows]
        pieces = [made + 100 * s + 10 * rank + torch.arange(size).double() for s, size in enumerate(sizes)]
        expected = torch.cat(pieces)[:, None].repeat(1, WIDTH)
        assert torch.equal(incoming, expected)
        assert made or torch.equal(computed, expected)


def lots(ranks: int) -> list[list[int]]:
    return [[(2 * s + 3 * d) % 4 for d in range(ranks)] for s in range(ranks)]


SUMS = ["linear_reduce_scatter.forward", "linear_all_reduce.forward", "column_all_reduce.backward"]
EXCHANGES = ["linear_all_to_all.forward", "all_to_all_linear.forward", "all_to_all_linear.backward"]


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("name", ORDERS)
def test_sums_over_ranks_are_right_in_every_order(name: str, ranks: int) -> None:
    for operator in SUMS:
        for rows in ([4] * ranks, uneven(ranks)):
            check_sums(operator, rows, in_threads(ranks, reduced, operator, name, rows, torch.float64))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", PAIR_ORDERS)
def test_all_to_alls_bring_every_piece_to_its_place(name: str, ranks: int) -> None:
    for operator in EXCHANGES:
        check_exchange(operator, lots(ranks), in_threads(ranks, exchanged, operator, name, lots(ranks)))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", [*WITH_BACKEND, "ring:2", "hierarchical:2"])
def test_sums_over_gloo(pool: Pool, name: str, world: int) -> None:
    for operator in SUMS:
        for rows in ([4] * world, uneven(world)):
            check_sums(
                operator, rows, pool.run(world, over_gloo, reduced, operator, name, rows, torch.float64)
            )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["blocking", *PAIR_ORDERS])
def test_all_to_alls_over_gloo(pool: Pool, name: str, world: int) -> None:
    for operator in EXCHANGES:
        results = pool.run(world, over_gloo, exchanged, operator, name, lots(world))
        check_exchange(operator, lots(world), results)


def rounding(name: str, ranks: int) -> float:
    """Root mean square of a bf16 sum's error, relative to the sum of the same contributions in fp64."""
    rows = [1200 // ranks] * ranks
    results = in_threads(ranks, reduced, "linear_reduce_scatter.forward", name, rows, torch.bfloat16)
    exact = sum(values(rank, sum(rows), torch.bfloat16).double() for rank in range(ranks))
    assert isinstance(exact, Tensor)
    error = torch.cat(results).double() - exact
    return float(error.norm() / exact.norm())


def test_sums_that_travel_in_fp32_round_once() -> None:
    """The error of a 16-bit ring grows with the group; with fp32 on the wire only the result is rounded."""
    plain, wide = ({n: rounding(name, n) for n in (2, 4, 8, 16)} for name in ("ring", "ring@fp32"))
    assert max(wide.values()) < 1.1 * min(wide.values())
    assert all(wide[n] < 0.9 * plain[n] for n in (4, 8, 16))
    assert plain[16] > 2 * plain[2]
    assert rounding("bidirectional@fp32", 8) < 1.1 * wide[8]
    assert rounding("hierarchical:2@fp32", 8) < 1.1 * wide[8]


def test_messages_in_fp32_are_counted_as_such() -> None:
    def sent(channel: Any, name: str, dtype: torch.dtype) -> int:
        reduced(channel, "linear_all_reduce.forward", name, [4, 4, 4], dtype)
        return channel.evidence.operators["linear_all_reduce.forward"].bytes_sent

    scatter = gather = 2 * 4 * WIDTH * 2
    assert in_threads(3, sent, "ring", torch.bfloat16) == [scatter + gather] * 3
    assert in_threads(3, sent, "ring@fp32", torch.bfloat16) == [2 * scatter + gather] * 3
    assert in_threads(3, sent, "ring@fp32", torch.float64) == [4 * (scatter + gather)] * 3

"""``brigata bench overlap``: starts the ranks, on loopback or shaped links, and shows what they measured."""

import json
import socket
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from brigata.describe.errors import JobError, one_of
from brigata.describe.order import parse_order
from brigata.measure.namespaces import check_can_shape, loopback_hosts, run_ranks, shaped_network
from brigata.measure.overlap_cases import OPERATIONS, PASSES, Shape


def bench_overlap(
    shape: Shape,
    ranks: int,
    orders: list[str],
    repetitions: int,
    rate: str | None,
    product_ms: float | None = None,
) -> dict[str, Any]:
    """Measure ``shape`` in all ``orders`` on ``ranks`` local ranks; links at ``rate`` or loopback.

    With ``product_ms`` devices are emulated: each chunk's product is a timed wait of so many milliseconds,
    and links are limited both ways.

    Raises:
        JobError: the request cannot be measured; nothing was started.
    """
    _refuse(shape, ranks, orders, repetitions, product_ms)
    request = {"shape": asdict(shape), "orders": orders, "repetitions": repetitions}
    request["product_ms"] = product_ms
    argv = [sys.executable, "-m", "brigata.measure.overlap_rank", json.dumps(request)]
    timeout_s = 600.0
    if rate is None:
        outputs = run_ranks(loopback_hosts(ranks), argv, timeout_s=timeout_s, port=_free_port())
    else:
        check_can_shape(rate)
        with shaped_network(ranks, rate, ingress=product_ms is not None) as hosts:
            outputs = run_ranks(hosts, argv, timeout_s=timeout_s)
    result: dict[str, Any] = json.loads(outputs[0].strip().splitlines()[-1])
    return (
        result
        | {"product_ms": product_ms, "ranks": ranks, "rate": rate or "loopback", "repetitions": repetitions}
        | asdict(shape)
    )


def _refuse(shape: Shape, ranks: int, orders: list[str], repetitions: int, product_ms: float | None) -> None:
    if shape.op not in OPERATIONS:
        raise JobError(f"--op {shape.op!r} is not known; use {one_of(OPERATIONS)}")
    if shape.direction not in PASSES:
        raise JobError(f"--pass {shape.direction!r} is not known; use {one_of(PASSES)}")
    if product_ms is not None and product_ms <= 0:
        raise JobError(f"--emulate {product_ms:g} is no time; use the milliseconds of a chunk's product, 20")
    if ranks < 2:
        raise JobError(f"--ranks {ranks} has nothing to overlap; use 2 or more")
    if repetitions < 1:
        raise JobError(f"--repetitions {repetitions} measures nothing; use 1 or more")
    if shape.tokens % ranks:
        raise JobError(f"--tokens {shape.tokens} is no multiple of --ranks {ranks}; use {ranks * 1024}")
    if min(shape.tokens, shape.hidden, shape.ffn) < 1:
        raise JobError("--tokens, --hidden and --ffn must be positive")
    for order in orders:
        if order == "auto" and product_ms is None:
            continue
        try:
            parse_order(order)
        except ValueError as error:
            raise JobError(f"--orders: {order!r} {error}") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def show_overlap(result: dict[str, Any], console: Console) -> None:
    """Print a table of the orders, and what they are compared with."""
    title = (
        f"{result['op']} {result['direction']}, {result['ranks']} ranks, {result['rate']}: "
        f"{result['tokens']} tokens, hidden {result['hidden']}, ffn {result['ffn']} a rank"
    )
    console.print(title, highlight=False)
    if result["product_ms"] is not None:
        console.print(
            f"EMULATED: a chunk's product is a wait of {result['product_ms']:g} ms, messages are real",
            style="yellow",
            highlight=False,
        )
    console.print(
        f"compute {result['compute_ms']:.1f} ms, messages {result['comm_ms']:.1f} ms, both at once without "
        f"dependencies (contended) {result['contended_ms']:.1f} ms",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("order", "time ms", "predicted ms", "exposed ms", "over contended", ""):
        table.add_column(name, justify="left" if name in ("order", "") else "right")
    slowest = max(figures["time_ms"] for figures in result["orders"].values())
    for order, figures in result["orders"].items():
        bar = "█" * max(round(20 * figures["time_ms"] / slowest), 1)
        table.add_row(
            order if figures["chosen"] == order else f"{order}: {figures['chosen']}",
            f"{figures['time_ms']:.1f}",
            f"{figures['predicted_ms']:.1f}",
            f"{figures['exposed_ms']:.1f}",
            f"{figures['ratio_to_contended']:.3f}",
            bar,
        )
    console.print(table, highlight=False)
    console.print(
        f"medians of {result['repetitions']} interleaved repetitions; while all ranks compute, each runs at "
        f"{result['second_core_share']:.0%} of the speed of one alone",
        highlight=False,
    )

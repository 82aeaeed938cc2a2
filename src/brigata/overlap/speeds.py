"""A quick measurement of this group's devices and links: what ``auto`` chooses by."""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from brigata.overlap.transport import post_messages

FEW, MANY, WIDTH = 128, 512, 1024
"""Rows of the products that are timed, and the width of their square weight; additions have many rows."""
SMALL, LARGE = 4 * 1024, 1024 * 1024
"""Elements of the messages that are timed, fp32."""
REPETITIONS = 9


@dataclass(frozen=True)
class Speeds:
    """What a rank and a link of the group do, the same numbers on every rank.

    Attributes:
        flops_per_s: of a product of the size of a layer's, in the dtype of the products.
        product_call_s: cost of one product of next to nothing (seconds).
        weight_s: what each element of its weight costs a product once, however few its rows are: a CPU
            rearranges the whole weight in every call (seconds).
        add_bytes_per_s: bytes that an addition writes in a second.
        post_s: host time that starting one message takes (seconds).
        latency_s: of a message (seconds).
        bytes_per_s: of a link, each way, while both ways are in use.
    """

    flops_per_s: float
    product_call_s: float
    weight_s: float
    add_bytes_per_s: float
    post_s: float
    latency_s: float
    bytes_per_s: float


def measure_speeds(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Speeds:
    """Measure, and take the mean over the group, all of whose ranks must call this; about 0.2 s on a CPU."""
    rows, weight = (torch.ones(n, WIDTH, dtype=dtype, device=device) for n in (MANY, WIDTH))
    tiny = torch.ones(8, 8, dtype=dtype, device=device)
    out = torch.empty_like(rows)
    many = _seconds(lambda: torch.mm(rows, weight.t(), out=out), device)
    few = _seconds(lambda: torch.mm(rows[:FEW], weight.t(), out=out[:FEW]), device)
    call = _seconds(lambda: torch.mm(tiny, tiny), device)
    addition = _seconds(lambda: torch.add(rows, rows, out=out), device)
    row_s = max(many - few, 1e-9) / (MANY - FEW)
    post, small = _exchange_seconds(group, SMALL, device)
    _, large = _exchange_seconds(group, LARGE, device)
    per_byte = max(large - small, 1e-9) / (4 * (LARGE - SMALL))
    mine = Speeds(
        flops_per_s=2 * WIDTH**2 / row_s,
        product_call_s=call,
        weight_s=max(few - call - FEW * row_s, 0.0) / WIDTH**2,
        add_bytes_per_s=out.nbytes / max(addition, 1e-9),
        post_s=post,
        latency_s=max(small - 4 * SMALL * per_byte - 2 * post, 1e-6),
        bytes_per_s=1 / per_byte,
    )
    numbers = torch.tensor(astuple(mine), dtype=torch.float32, device=device)
    dist.all_reduce(numbers, group=group)
    return Speeds(*(numbers / dist.get_world_size(group)).tolist())


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPETITIONS):
        start = perf_counter()
        action()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(perf_counter() - start)
    return median(times[1:])


def _exchange_seconds(group: dist.ProcessGroup, elements: int, device: torch.device) -> tuple[float, float]:
    """Seconds to start one message, and until messages to the right and from the left have arrived."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % size, (rank - 1) % size
    outgoing, incoming = (torch.zeros(elements, device=device) for _ in range(2))
    posts, totals = [], []
    for _ in range(REPETITIONS):
        dist.barrier(group=group)
        start = perf_counter()
        works = post_messages(group, [(True, outgoing, right), (False, incoming, left)])
        posts.append((perf_counter() - start) / 2)
        for work in works:
            work.wait()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        totals.append(perf_counter() - start)
    return median(posts[1:]), median(totals[1:])

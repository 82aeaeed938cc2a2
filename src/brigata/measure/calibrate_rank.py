"""One of two ranks of ``brigata calibrate``: ``python -m brigata.measure.calibrate_rank REQUEST``, in JSON.

Rank 0 prints the result as JSON on its last line.
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from brigata.overlap.transport import post_messages

SIZES = (2**10, 2**14, 2**18, 2**21, 2**24)
"""Bytes of the whole tensor; of the tensor that a rank holds, for all-to-all and all-reduce."""
BACK_TO_BACK = 2**21
"""Bytes that a small exchange is repeated for in one sample, at most ``MOST`` times."""
MOST = 20
WINDOW_S = 0.12
"""How long products are counted, alone and together (seconds)."""


def measure(repetitions: int) -> dict[str, object]:
    """Seconds of every operation and size, and the speed of products while both ranks compute."""
    together = _together(repetitions)
    cases = {(name, size): build(size) for size in SIZES for name, build in OPERATIONS.items()}
    samples: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for repetition in range(-1, repetitions):  # repetition -1 warms up and does not count
        for (name, size), action in cases.items():
            seconds = _time(action, max(min(BACK_TO_BACK // size, MOST), 1))
            if repetition >= 0:
                samples[name, size].append(seconds)
    times = {name: [median(samples[name, size]) for size in SIZES] for name in OPERATIONS}
    times["send"] = [seconds / 2 for seconds in times["send"]]
    return {"sizes": SIZES, "seconds": times, "together": together}


def _time(action: Callable[[], object], count: int) -> float:
    """Seconds of one of ``count`` calls, from a common start to the last rank's end."""
    dist.barrier()
    start = perf_counter()
    for _ in range(count):
        action()
    duration = torch.tensor((perf_counter() - start) / count, dtype=torch.float64)
    dist.all_reduce(duration, dist.ReduceOp.MAX)
    return float(duration)


def _send(size: int) -> Callable[[], None]:
    """A message to the other rank, then one back."""
    buffer, first = torch.zeros(size // 4), dist.get_rank() == 0

    def run() -> None:
        for outgoing in (first, not first):
            _finish([(outgoing, buffer, 1 - dist.get_rank())])

    return run


def _exchange(size: int, add: bool = False) -> Callable[[], None]:
    """Half of the tensor to the other rank, its half here; ``add``: the sum of both."""
    mine, arriving = torch.zeros(size // 8), torch.zeros(size // 8)
    peer = 1 - dist.get_rank()

    def run() -> None:
        _finish([(True, mine, peer), (False, arriving, peer)])
        if add:
            arriving.add_(mine)

    return run


def _all_reduce(size: int) -> Callable[[], object]:
    tensor = torch.zeros(size // 4)
    return lambda: dist.all_reduce(tensor)


def _finish(messages: list[tuple[bool, torch.Tensor, int]]) -> None:
    group = dist.group.WORLD
    assert group is not None
    for work in post_messages(group, messages):
        work.wait()


OPERATIONS: dict[str, Callable[[int], Callable[[], object]]] = {
    "send": _send,
    "all_gather": _exchange,
    "reduce_scatter": lambda size: _exchange(size, add=True),
    "all_reduce": _all_reduce,
    "all_to_all": _exchange,
}
"""As the runtime does them: messages between ranks, but for all-reduce. ``send`` is there and back."""


def _together(repetitions: int) -> float:
    """Speed of each rank's products while both compute, over that of rank 0 alone; median of pairs."""
    a = torch.ones(512, 512)

    def rate() -> float:
        done, start = 0, perf_counter()
        while perf_counter() - start < WINDOW_S:
            torch.mm(a, a)
            done += 1
        return done / (perf_counter() - start)

    ratios = []
    rate()
    for _ in range(repetitions):
        dist.barrier()
        alone = torch.tensor(rate() if dist.get_rank() == 0 else 0.0)
        dist.barrier()
        both = torch.tensor(rate())
        dist.all_reduce(alone)
        dist.all_reduce(both)
        ratios.append(float(both / 2 / alone))
    return median(ratios)


def main() -> None:
    """Join the world of the environment, measure, print."""
    request = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    result = measure(request["repetitions"])
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

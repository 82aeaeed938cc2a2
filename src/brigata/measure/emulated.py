"""Emulated devices: products are timed waits, messages are real; 8 ranks can be studied on 2 cores.

The host's own work between two products (starting messages, adding, waking up late from a timed wait) does
not delay a device, as if the products had been queued ahead: only a wait for a message leaves it idle.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from brigata.describe.order import parse_order
from brigata.measure.overlap_cases import Case, Shape, exchange_messages
from brigata.measure.prediction import operator_of
from brigata.overlap.auto import Work
from brigata.overlap.channel import Channel
from brigata.overlap.executor import allocate, execute
from brigata.schedule.build import INPUT_GRADIENT, OUTPUT, WEIGHT_GRADIENT


def build_emulated_case(shape: Shape, group: dist.ProcessGroup, product_s: float) -> Case:
    """A case whose every product of one chunk takes ``product_s`` seconds and computes nothing.

    Messages have the size that ``shape`` gives them. There is no numeric result to check.
    """
    n = dist.get_world_size(group)
    dtype = getattr(torch, shape.dtype)
    per_row = product_s / (shape.tokens // n)
    operator = operator_of(shape)
    gathers = operator in ("all_gather_linear.forward", "linear_reduce_scatter.backward")
    kinds = (OUTPUT,) if shape.direction == "forward" else (INPUT_GRADIENT, WEIGHT_GRADIENT)
    gathered = torch.zeros(shape.tokens, shape.hidden, dtype=dtype)
    own = torch.zeros(shape.tokens // n, shape.hidden, dtype=dtype)
    channels: dict[str, Channel] = {}

    def run(order: str) -> tuple[Tensor, ...]:
        if order not in channels:
            channels[order] = Channel(group, torch.device("cpu"), parse_order(order))
        channel = channels[order]
        work = Work(0.0, shape.hidden, dtype.itemsize)
        plan = channel.prepare(operator, (shape.tokens // n,) * n, work)
        memory = allocate(plan, shape.hidden, own, gathered if gathers else None, None if gathers else own)
        counted = channel.evidence.operators[operator]
        device = Device(lambda: counted.exposed_s)

        def product(rows: slice, _: Tensor | None) -> None:
            device.compute((rows.stop - rows.start) * per_row)

        execute(channel, operator, plan, memory, dict.fromkeys(kinds, product))
        return ()

    def products() -> tuple[Tensor, ...]:
        Device(lambda: 0.0).compute(len(kinds) * n * product_s)
        return ()

    return Case(run, products, exchange_messages(own, group), ())


class Device:
    """Computes one product after the other, at once unless its host waited for a message in between.

    Args:
        waited_s: seconds that the host has waited for messages so far.
    """

    def __init__(self, waited_s: Callable[[], float]) -> None:
        self._waited_s = waited_s
        self._seen_s = waited_s()
        self._free = time.perf_counter()

    def compute(self, seconds: float) -> None:
        """Return when a product of ``seconds`` has ended; the host sleeps meanwhile."""
        waited = self._waited_s()
        self._free += waited - self._seen_s + seconds
        self._seen_s = waited
        remaining = self._free - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)

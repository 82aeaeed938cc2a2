"""Emulated devices: products are timed waits, messages are real; 8 ranks can be studied on 2 cores."""

import time

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

SPIN_S = 2e-4
"""A wait sleeps until this long before its end and then watches the clock (seconds)."""


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

    def product(rows: slice, _: Tensor | None) -> None:
        wait_until(time.perf_counter() + (rows.stop - rows.start) * per_row)

    def run(order: str) -> tuple[Tensor, ...]:
        if order not in channels:
            channels[order] = Channel(group, torch.device("cpu"), parse_order(order))
        channel = channels[order]
        work = Work(0.0, shape.hidden, dtype.itemsize)
        plan = channel.prepare(operator, (shape.tokens // n,) * n, work)
        memory = allocate(plan, shape.hidden, own, gathered if gathers else None, None if gathers else own)
        execute(channel, operator, plan, memory, dict.fromkeys(kinds, product))
        return ()

    def products() -> tuple[Tensor, ...]:
        wait_until(time.perf_counter() + len(kinds) * n * product_s)
        return ()

    return Case(run, products, exchange_messages(own, group), ())


def wait_until(deadline: float) -> None:
    """Let ``time.perf_counter`` reach ``deadline`` with little use of the processor."""
    remaining = deadline - time.perf_counter() - SPIN_S
    if remaining > 0:
        time.sleep(remaining)
    while time.perf_counter() < deadline:
        pass

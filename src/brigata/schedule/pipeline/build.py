"""Pipeline schedules by name."""

from collections.abc import Callable
from functools import lru_cache

from brigata.describe.errors import one_of
from brigata.schedule.pipeline.greedy import zero_bubble_h2, zero_bubble_v
from brigata.schedule.pipeline.orders import (
    Program,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
)
from brigata.schedule.pipeline.programs import PipelineSchedule

Order = Callable[[int, int, int, int], Program]


def _single(order: Callable[[int, int, int], Program]) -> Order:
    return lambda ranks, rank, _, micro_batches: order(ranks, rank, micro_batches)


PIPELINE_ORDERS: dict[str, Order] = {
    "gpipe": _single(gpipe),
    "1f1b": _single(one_f_one_b),
    "interleaved": interleaved,
    "zb-h1": _single(zero_bubble_h1),
    "zb-h2": lambda ranks, rank, _, micro_batches: zero_bubble_h2(ranks, micro_batches)[rank],
    "zb-v": lambda ranks, rank, _, micro_batches: zero_bubble_v(ranks, micro_batches)[rank],
    "dualpipe-v": _single(dual_pipe_v),
}
"""Name -> the program of a rank: (ranks, rank, virtual stages, micro-batches)."""
V_SHAPED = ("zb-v", "dualpipe-v")
"""Orders whose ranks hold one stage of the way there and one of the way back."""


@lru_cache(maxsize=256)
def build_pipeline(
    order: str, ranks: int, micro_batches: int, virtual_stages: int | None = None
) -> PipelineSchedule:
    """The schedule of all ranks.

    Args:
        order: a name in ``PIPELINE_ORDERS``.
        ranks: pipeline ranks.
        micro_batches: of one optimizer step.
        virtual_stages: stages a rank; default: what the order needs, 2 for ``interleaved``.

    Raises:
        ValueError: the order is not known, or does not go with the numbers; one sentence with a way out.
    """
    if order not in PIPELINE_ORDERS:
        raise ValueError(f"pipeline order {order!r} is not known; use {one_of(PIPELINE_ORDERS)}")
    if ranks < 1 or micro_batches < 1:
        raise ValueError(
            f"{ranks} ranks and {micro_batches} micro-batches make no pipeline; use 1 or more of each"
        )
    fixed = 2 if order in V_SHAPED else None if order == "interleaved" else 1
    stages = virtual_stages or fixed or 2
    if fixed is not None and stages != fixed:
        raise ValueError(
            f"pipeline order {order!r} has {fixed} virtual stages a rank, not {stages}; leave them out"
        )
    programs = tuple(PIPELINE_ORDERS[order](ranks, rank, stages, micro_batches) for rank in range(ranks))
    loop = tuple(stage % ranks for stage in range(ranks * stages))
    there_and_back = (*range(ranks), *reversed(range(ranks)))
    return PipelineSchedule(programs, there_and_back if order in V_SHAPED else loop, micro_batches)

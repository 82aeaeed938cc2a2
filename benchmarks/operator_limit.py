"""The least time of a tensor-parallel step with its operators as they are: what no order can beat.

An operator's messages can hide under its own products and nowhere else. So a step takes at least its time
without exposed communication, plus, for every operator call, the part of its messages for which its own
products are too short: ``max(0, simulate.lower_bound - products)``. All of it is measured in the run that it
is compared with: the step and its exposed time on each rank, each call's products, and a bare exchange of one
chunk on the same link.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from brigata.describe.order import Order
from brigata.overlap.auto import Work
from brigata.overlap.channel import Channel
from brigata.overlap.evidence import OperatorEvidence
from brigata.schedule.build import OPERATORS, build_program
from brigata.schedule.chunks import Chunks
from brigata.schedule.steps import Compute
from brigata.simulate import Duration, Durations, Link, Network, lower_bound


@dataclass
class Call:
    """One operator pass: tokens of each rank, bytes of a token in a message, seconds of its products."""

    operator: str
    rows: tuple[int, ...]
    row_bytes: int
    compute_s: float = 0.0


class Recorder:
    """Notes the operator calls of ``channel`` in their order, each with the time of its own products."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._calls, self._before_s = channel, list[Call](), 0.0
        prepare = channel.prepare

        def noted(operator: str, rows: Sequence[int], work: Work) -> Any:
            self._close()
            self._calls.append(Call(operator, tuple(rows), work.width * work.itemsize))
            return prepare(operator, rows, work)

        channel.prepare = noted  # type: ignore[method-assign]

    def take(self) -> tuple[list[Call], dict[str, OperatorEvidence]]:
        """Calls and evidence since the last time; both begin anew."""
        self._close()
        calls, self._calls, self._before_s = self._calls, [], 0.0
        return calls, self._channel.evidence.take()

    def _close(self) -> None:
        """What was computed since the last call began is that call's."""
        total_s = sum(counted.compute_s for counted in self._channel.evidence.operators.values())
        if self._calls:
            self._calls[-1].compute_s = total_s - self._before_s
        self._before_s = total_s


def exposed_s(evidence: dict[str, OperatorEvidence]) -> float:
    """Exposed communication of the tensor-parallel operators (seconds); norms and the like are not among
    them.
    """
    return sum(counted.exposed_s for name, counted in evidence.items() if name in OPERATORS)


def inevitable_s(call: Call, bytes_per_s: float) -> float:
    """Seconds of a call's messages that its own products cannot hide, in any order.

    The call's products are taken as equally long, which they are: I and W have the same number of operations.
    """
    blocking = build_program(call.operator, Order("blocking"), Chunks(call.rows), 0)
    products = {step.product for step in blocking.steps if isinstance(step, Compute)}
    tokens = sum(call.rows)
    each = Duration(call.compute_s / max(len(products), 1) / tokens)
    timed = Durations(products=dict.fromkeys(products, each), bytes_per_row=call.row_bytes)
    bound_s = lower_bound(call.operator, call.rows, timed, Network(Link(bytes_per_s)))
    return max(0.0, bound_s - call.compute_s)


@dataclass
class Steps:
    """What one rank noted of an order's steps: milliseconds a repetition, and each step's calls."""

    own_ms: list[float]
    exposed_ms: list[float]
    calls: list[list[Call]]

    def plain(self) -> dict[str, Any]:
        """For the other rank."""
        return asdict(self)


def typical_calls(ranks: Sequence[dict[str, Any]]) -> list[Call]:
    """The calls of a step, which are the same in every repetition; products by their median, mean over ranks.

    ``ranks`` are ``Steps.plain`` of every rank.
    """
    calls = [Call(**call) for call in ranks[0]["calls"][0]]
    for i, call in enumerate(calls):
        medians = [median(step[i]["compute_s"] for step in rank["calls"]) for rank in ranks]
        call.compute_s = sum(medians) / len(medians)
    return calls


def operator_limit(ranks: Sequence[dict[str, Any]], bytes_per_s: float) -> dict[str, Any]:
    """The limit of an order's steps in every repetition, and its parts (milliseconds).

    The rank that has most to do besides waiting decides.
    """
    calls = typical_calls(ranks)
    inevitable_ms = sum(inevitable_s(call, bytes_per_s) for call in calls) * 1e3
    busy = [
        max(rank["own_ms"][i] - rank["exposed_ms"][i] for rank in ranks)
        for i in range(len(ranks[0]["own_ms"]))
    ]
    return {
        "limit_ms": [busy_ms + inevitable_ms for busy_ms in busy],
        "inevitable_ms": inevitable_ms,
        "exposed_ms": [max(both) for both in zip(*(rank["exposed_ms"] for rank in ranks), strict=True)],
        "products_ms": sum(call.compute_s for call in calls) * 1e3,
        "calls": len(calls),
    }

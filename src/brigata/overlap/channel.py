"""One rank's end of a group: what every operator of the group shares."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from brigata.describe.order import Order
from brigata.overlap.auto import Chooser, Work
from brigata.overlap.deferred import WeightGradientQueue
from brigata.overlap.evidence import Evidence
from brigata.overlap.plan import Plan, bind
from brigata.overlap.transport import post_messages, posts_at_once
from brigata.schedule.build import build_program, build_schedule
from brigata.schedule.checker import check
from brigata.schedule.chunks import Chunks
from brigata.schedule.steps import Step


class Channel:
    """Posts messages, owns the evidence, and gives each operator its plan. Nothing of it is global.

    Args:
        group: the ranks that work together.
        device: where the operators' tensors are.
        order: how operators interleave products and messages: one order for all, or a chooser.
        evidence: where the operators count what they did; default: a new one.
        before_step: called ahead of every step; tests inject delays here.
        proven: check each new schedule for all ranks before it first runs (slow; for debugging).

    ``weight_gradients`` is the queue to which linear operators on this channel leave their weight gradients
    when they are called while it is active; None: they never do.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        order: Order | Chooser,
        evidence: Evidence | None = None,
        before_step: Callable[[Step], None] | None = None,
        proven: bool = False,
    ) -> None:
        self.group = group
        self.device = device
        self.order = order
        self.before_step = before_step
        self.proven = proven
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.evidence = Evidence() if evidence is None else evidence
        self.weight_gradients: WeightGradientQueue | None = None
        self._ahead = posts_at_once(group)
        self._plans: dict[tuple[str, Order, Chunks], Plan] = {}

    def prepare(self, operator: str, rows: Sequence[int], work: Work) -> Plan:
        """This rank's program for one operator pass over tokens of which rank r owns ``rows[r]``.

        ``work`` is what a chooser chooses by. The program is built, with its work buffers laid out, once for
        each order and cut.
        """
        assert len(rows) == self.size, f"{len(rows)} chunk sizes for a group of {self.size}"
        rows = tuple(rows)
        order = self.order if isinstance(self.order, Order) else self.order.order(operator, rows, work)
        chunks = Chunks(rows, order.parts)
        key = (operator, order, chunks)
        if key not in self._plans:
            if self.proven:
                check(build_schedule(operator, order, chunks, self._ahead), stream=not self._ahead)
            self._plans[key] = bind(build_program(operator, order, chunks, self.rank, self._ahead), chunks)
        return self._plans[key]

    def post(self, messages: Sequence[tuple[bool, Tensor, int]]) -> list[dist.Work]:
        """Start (outgoing, buffer, peer) messages together; one handle a message, maybe the same for all."""
        return post_messages(self.group, messages)

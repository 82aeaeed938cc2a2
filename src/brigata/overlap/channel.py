"""One rank's end of a group: posts messages, owns the evidence, and knows the order its operators use."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from brigata.describe.order import Order
from brigata.overlap.evidence import Evidence
from brigata.overlap.plan import Plan, bind
from brigata.schedule.build import build_program, build_schedule
from brigata.schedule.checker import check
from brigata.schedule.chunks import Chunks
from brigata.schedule.steps import Step


class Channel:
    """What every operator of one process group shares. Nothing of it is global.

    Args:
        group: the ranks that work together.
        device: where the operators' tensors are.
        order: how the operators interleave products and messages.
        evidence: where the operators count what they did; default: a new one.
        before_step: called ahead of every step; tests inject delays here.
        proven: check each new schedule for all ranks before it first runs (slow; for debugging).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        order: Order,
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
        self._plans: dict[tuple[str, Chunks], Plan] = {}

    def chunks(self, rows: Sequence[int]) -> Chunks:
        """The cut of tokens of which rank r owns ``rows[r]``, in as many sub-chunks as the order has."""
        assert len(rows) == self.size, f"{len(rows)} chunk sizes for a group of {self.size}"
        return Chunks(tuple(rows), self.order.parts)

    def plan(self, operator: str, chunks: Chunks) -> Plan:
        """This rank's program for ``operator``, with its work buffers laid out; built once for each cut."""
        key = (operator, chunks)
        if key not in self._plans:
            if self.proven:
                check(build_schedule(operator, self.order, chunks))
            self._plans[key] = bind(build_program(operator, self.order, chunks, self.rank), chunks)
        return self._plans[key]

    def post(self, messages: Sequence[tuple[bool, Tensor, int]]) -> list[dist.Work]:
        """Start (outgoing, buffer, peer) messages together; one handle a message, maybe the same for all.

        Receives are started first: gloo tells the sender that a buffer is ready on the connection on which
        our own data leaves, and behind that data the notice would come late (two 4 MiB messages that cross
        on a 1 Gbit/s link: 36 instead of 60 to 70 ms).
        """
        ranked = sorted(range(len(messages)), key=lambda i: messages[i][0])
        operations = []
        for i in ranked:
            outgoing, buffer, peer = messages[i]
            start = dist.isend if outgoing else dist.irecv
            operations.append(dist.P2POp(start, buffer, group=self.group, group_peer=peer))
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(messages):  # the backend coalesced them
            return [works[0]] * len(messages)
        return [work for _, work in sorted(zip(ranked, works, strict=True), key=lambda pair: pair[0])]

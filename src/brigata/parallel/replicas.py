"""Sums over replicas: what hybrid sharded data parallelism adds to ZeRO."""

from collections.abc import Mapping
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from brigata.overlap.channel import Channel
from brigata.parallel.messages import REPLICATE, Message, post_counted, turns


class ReplicaSum:
    """A tensor being summed over the ranks that own the same rows, in place, bitwise the same on all of them.

    Per rank, n ranks, E elements::

        2 ranks   everything there and back                      E elements sent in 1 message
        n ranks   slice j to rank j, which sums in rank order;   2 * E * (n - 1) / n elements sent
                  the sums back to everybody                     in 2 * (n - 1) messages

    The first messages leave at once.

    Args:
        mine: (E,), contiguous, fp32 or wider; nobody else touches it before ``finish`` returns.
        channel: of the ranks that own the same rows.
    """

    def __init__(self, mine: Tensor, channel: Channel) -> None:
        self.mine, self.channel = mine, channel
        slices = mine.tensor_split(channel.size) if channel.size > 2 else (mine, mine)
        self.slices = dict(enumerate(slices))
        slot = self.slices[channel.rank]
        self.received = {source: torch.empty_like(slot) for _, source in turns(channel)}
        counted = channel.evidence.operators[REPLICATE]
        counted.calls += 1
        counted.overlapped_calls += 1
        self.started_s = perf_counter()
        self.works = self._post(self.slices, self.received)
        self.summed = False

    def send_back(self, where: str) -> None:
        """Sum the own slice when it is there and send it to everybody; waits are counted under ``where``."""
        if self.summed:
            return
        self._wait(where)
        slot = self.slices[self.channel.rank]
        terms = self.received | {self.channel.rank: slot}
        total, *others = (terms[rank] for rank in sorted(terms))
        for other in others:
            total = total + other
        slot.copy_(total)
        self.summed = True
        if self.channel.size > 2:
            own = dict.fromkeys(range(self.channel.size), slot)
            self.works = self._post(own, self.slices)

    def finish(self, where: str) -> None:
        """Wait until the whole tensor is the sum."""
        self.send_back(where)
        self._wait(where)
        name = f"{REPLICATE}: {self.mine.numel()} elements"
        self.channel.evidence.span("message", name, self.started_s, perf_counter())

    def _post(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> list[dist.Work]:
        messages: list[Message] = []
        for to, source in turns(self.channel):
            messages += [(True, outgoing[to], to), (False, incoming[source], source)]
        return post_counted(self.channel, REPLICATE, [m for m in messages if m[1].numel()])

    def _wait(self, where: str) -> None:
        with self.channel.evidence.waiting(REPLICATE, where, self.channel.device):
            for work in self.works:
                work.wait()
        self.works = []

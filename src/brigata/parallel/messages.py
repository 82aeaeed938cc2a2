"""Messages of data parallelism: named by what travels, counted as they are posted."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from brigata.overlap.channel import Channel

GATHER, SCATTER = "data_parallel.gather", "data_parallel.scatter"
"""Operators under which parameters on their way to everybody and gradients to their owners are counted."""
REPLICATE = "data_parallel.replicate"
"""Operator under which sums over replicas are counted."""

Message = tuple[bool, Tensor, int]
"""Outgoing or not, the buffer, and the other rank."""


def turns(channel: Channel) -> list[tuple[int, int]]:
    """Whom this rank sends to and receives from, turn by turn, until everybody met everybody."""
    me, n = channel.rank, channel.size
    return [((me + i) % n, (me - i) % n) for i in range(1, n)]


def post_counted(channel: Channel, operator: str, messages: Sequence[Message]) -> list[dist.Work]:
    """Start ``messages`` together and count those that leave; the handles to wait for."""
    counted = channel.evidence.operators[operator]
    counted.messages += sum(outgoing for outgoing, _, _ in messages)
    counted.bytes_sent += sum(buffer.nbytes for outgoing, buffer, _ in messages if outgoing)
    return channel.post(messages) if messages else []

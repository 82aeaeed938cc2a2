"""Point-to-point messages on ``torch.distributed``: the only place that starts one."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

Outgoing = bool


def posts_at_once(group: dist.ProcessGroup) -> bool:
    """Whether each message is on its own, rather than in line on a stream behind those posted before."""
    return str(dist.get_backend(group)) == "gloo"


def post_messages(
    group: dist.ProcessGroup, messages: Sequence[tuple[Outgoing, Tensor, int]]
) -> list[dist.Work]:
    """Start (outgoing, buffer, peer) messages together; one handle a message, maybe the same for all.

    Receives are started first: gloo tells the sender that a buffer is ready on the connection on which our
    own data leaves, and behind that data the notice would come late (two 4 MiB messages that cross on a 1
    Gbit/s link: 36 instead of 60 to 70 ms).
    """
    ranked = sorted(range(len(messages)), key=lambda i: messages[i][0])
    operations = []
    for i in ranked:
        outgoing, buffer, peer = messages[i]
        start = dist.isend if outgoing else dist.irecv
        operations.append(dist.P2POp(start, buffer, group=group, group_peer=peer))
    works = dist.batch_isend_irecv(operations)
    if len(works) < len(messages):  # the backend coalesced them
        return [works[0]] * len(messages)
    return [work for _, work in sorted(zip(ranked, works, strict=True), key=lambda pair: pair[0])]

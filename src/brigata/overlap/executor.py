"""Executes a plan: the only place where messages are posted, waited for and added."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from brigata.overlap.channel import Channel
from brigata.overlap.plan import Action, Plan, Region
from brigata.schedule.chunks import Pairs
from brigata.schedule.steps import Add, Barrier, Collective, Compute, Message, Post, Send, Space, Wait

Product = Callable[[slice, Tensor | None], None]
"""Compute on these token rows; a result that travels or stays is written to the tensor given."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of 16-bit contributions are kept in fp32; wider ones in their own precision."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True)
class Memory:
    """The tensors behind a plan's spaces, each (rows, width), contiguous; absent ones are not used.

    ``dtype`` is the products'; their results are cast where a space has another one.
    """

    spaces: Mapping[Space, Tensor]
    dtype: torch.dtype

    def view(self, region: Region) -> Tensor:
        """The rows that ``region`` names, without a copy."""
        return self.spaces[region.space][region.rows]


def allocate(
    plan: Plan,
    width: int,
    like: Tensor,
    gathered: Tensor | None = None,
    own: Tensor | None = None,
    outgoing: Tensor | None = None,
    incoming: Tensor | None = None,
) -> Memory:
    """Memory for one run of ``plan``: work buffers of ``width`` columns on ``like``'s device.

    They are in ``like``'s dtype, which is that of the products, or in the wire's where that is wider.
    """
    wide = accumulation_dtype(like.dtype)
    work = like.new_empty(plan.work_rows, width, dtype=wide if plan.wire == "fp32" else like.dtype)
    spaces: dict[Space, Tensor] = {"work": work}
    if plan.sum_rows:
        spaces["sum"] = like.new_empty(plan.sum_rows, width, dtype=wide)
    cut: dict[Space, Tensor | None] = {
        "gathered": gathered, "own": own, "outgoing": outgoing, "incoming": incoming
    }  # fmt: skip
    spaces |= {space: tensor for space, tensor in cut.items() if tensor is not None}
    return Memory(spaces, like.dtype)


def execute(
    channel: Channel, operator: str, plan: Plan, memory: Memory, products: Mapping[str, Product]
) -> None:
    """Run ``plan`` on this rank; returns when every message has been delivered and every product computed.

    Buffers stay referenced until their messages have been waited for. What was done is added to
    ``channel.evidence`` under ``operator``.
    """
    counted = channel.evidence.operators[operator]
    counted.calls += 1
    counted.overlapped_calls += plan.overlapped
    handles: dict[Message, tuple[dist.Work, float]] = {}
    for action in plan.actions:
        step = action.step
        if channel.before_step is not None:
            channel.before_step(step)
        match step:
            case Compute(product=product):
                out = memory.view(action.regions[0]) if action.regions else None
                with channel.evidence.computing(operator, product):
                    _compute(products[product], action.rows, out, memory.dtype)
            case Post():
                handles |= _post(channel, operator, action, memory)
            case Wait(message=message):
                handle, started = handles.pop(message)
                with channel.evidence.waiting(operator, action.where, channel.device):
                    handle.wait()
                channel.evidence.span("message", _name(operator, message), started, perf_counter())
            case Add():
                _add([memory.view(region) for region in action.regions])
            case Collective(operation=operation):
                with channel.evidence.waiting(operator, action.where, channel.device):
                    _COLLECTIVES[operation](channel, plan, memory)
            case Barrier():
                with channel.evidence.waiting(operator, action.where, channel.device):
                    dist.barrier(group=channel.group)
    assert not handles, f"{operator}: messages never waited for: {list(handles)}"


def _compute(product: Product, rows: slice, out: Tensor | None, dtype: torch.dtype) -> None:
    """Run ``product``, by way of a tensor of its own dtype where its result travels in another one."""
    if out is None or out.dtype == dtype:
        product(rows, out)
        return
    result = torch.empty_like(out, dtype=dtype)
    product(rows, result)
    out.copy_(result)


def _name(operator: str, message: Message) -> str:
    way = "to" if isinstance(message, Send) else "from"
    return f"{operator}: chunk {message.piece.chunk}.{message.piece.sub} {way} rank {message.peer}"


def _post(
    channel: Channel, operator: str, action: Action, memory: Memory
) -> dict[Message, tuple[dist.Work, float]]:
    """Start an action's messages; for each one its handle and when it was started (seconds)."""
    assert isinstance(action.step, Post)
    messages = action.step.messages
    buffers = [memory.view(region) for region in action.regions]
    outgoing = [isinstance(message, Send) for message in messages]
    counted = channel.evidence.operators[operator]
    counted.messages += sum(outgoing)
    counted.bytes_sent += sum(buffer.nbytes for buffer, out in zip(buffers, outgoing, strict=True) if out)
    peers = [message.peer for message in messages]
    started = perf_counter()
    works = channel.post(list(zip(outgoing, buffers, peers, strict=True)))
    return {message: (work, started) for message, work in zip(messages, works, strict=True)}


def _add(tensors: list[Tensor]) -> None:
    """Sum all but the last into the last, from left to right, in fp32 or better; it may be a source too."""
    *sources, target = tensors
    wide = accumulation_dtype(target.dtype)
    if len(sources) == 1:
        target.copy_(sources[0])
        return
    *early, last = (source.to(wide) for source in sources)
    total = early[0]
    for i, source in enumerate(early[1:]):
        total = total + source if i == 0 else total.add_(source)
    if target.dtype == wide:
        torch.add(total, last, out=target)
    else:
        target.copy_(total + last)


def _all_gather(channel: Channel, plan: Plan, memory: Memory) -> None:
    """The backend's all-gather; chunks of different sizes are padded to the largest."""
    gathered, chunks = memory.spaces["gathered"], plan.chunks
    own = gathered[chunks.chunk_span(plan.rank)]
    if len(set(chunks.rows)) == 1:
        dist.all_gather_single(gathered, own.clone(), group=channel.group)
        return
    largest = max(chunks.rows)
    padded = own.new_zeros(largest, own.shape[1])
    padded[: len(own)] = own
    everything = own.new_empty(chunks.ranks * largest, own.shape[1])
    dist.all_gather_single(everything, padded, group=channel.group)
    for chunk, rows in enumerate(chunks.rows):
        gathered[chunks.chunk_span(chunk)] = everything[chunk * largest : chunk * largest + rows]


def _reduce_scatter(channel: Channel, plan: Plan, memory: Memory) -> None:
    """The backend's reduce-scatter; chunks of different sizes are padded to the largest."""
    work, own, chunks = memory.spaces["work"], memory.spaces["own"], plan.chunks
    if len(set(chunks.rows)) == 1:
        dist.reduce_scatter_single(own, work, group=channel.group)
        return
    largest = max(chunks.rows)
    padded = work.new_zeros(chunks.ranks * largest, work.shape[1])
    for chunk, rows in enumerate(chunks.rows):
        padded[chunk * largest : chunk * largest + rows] = work[chunks.chunk_span(chunk)]
    total = work.new_empty(largest, work.shape[1])
    dist.reduce_scatter_single(total, padded, group=channel.group)
    own.copy_(total[: chunks.rows[plan.rank]])


def _all_reduce(channel: Channel, plan: Plan, memory: Memory) -> None:
    """The backend's all-reduce, in place."""
    dist.all_reduce(memory.spaces["gathered"], group=channel.group)


def _all_to_all(channel: Channel, plan: Plan, memory: Memory) -> None:
    """The backend's all-to-all of uneven pieces."""
    pairs = plan.chunks
    assert isinstance(pairs, Pairs)
    sent, got = pairs.rows_between(plan.rank)
    incoming, outgoing = memory.spaces["incoming"], memory.spaces["outgoing"]
    dist.all_to_all_single(incoming, outgoing, got, sent, group=channel.group)


_COLLECTIVES = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}

"""Data parallelism by our own ZeRO engine: parameters gathered ahead, gradients scattered as they appear.

Parameters that are used together (the embedding, each unit, the last norm with the head) form a group. A
group is gathered by point-to-point messages while the group before it computes, and each weight gradient
leaves for its owners the moment its operator has made it, while the backward goes on.

    ZeRO-1   whole parameters and whole gradients during a step; gradients are scattered in its last
    micro-batch ZeRO-2   gradients are scattered in every micro-batch ZeRO-3   parameters are dropped after
    a group's forward and gathered again for its backward

Source of the stages: Rajbhandari et al., arXiv 1910.02054.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch.distributed as dist
from torch import Tensor, nn

from brigata.model.decoder import Decoder
from brigata.overlap.channel import Channel
from brigata.overlap.executor import accumulation_dtype
from brigata.parallel.sharded_parameter import ShardedParameter, parameters_with_owners

GATHER, SCATTER = "data_parallel.gather", "data_parallel.scatter"
"""Operators under which the engine counts what it does."""
AHEAD = 2
"""Groups that are gathered before they are needed. A Transformer layer is two units, and a feed-forward's
weights may take longer to arrive than the attention before it takes to compute."""
BEHIND = 4
"""Groups whose gradients may be under way when another group's backward begins; bounds memory."""


@dataclass
class _Scatter:
    """One gradient on its way: ``received[r]`` is rank r's contribution to the rows that are owned here."""

    parameter: ShardedParameter
    gradient: Tensor
    received: Tensor
    works: list[dist.Work]
    started_s: float


@dataclass(eq=False)
class _Group:
    """Parameters that are used together, and where they stand."""

    modules: Sequence[nn.Module]
    parameters: list[ShardedParameter] = field(default_factory=list)
    gathering: list[dist.Work] | None = None
    started_s: float = 0.0
    whole: bool = False
    scatters: list[_Scatter] = field(default_factory=list)


class DataEngine:
    """Runs ``model`` under ZeRO: hooks on its groups gather and scatter; the loop calls the public methods.

    Args:
        model: parameters already cut over the dp axis by ``shard_over_data``; they may still be on the meta
        device
            and are looked up at the first forward.
        channel: the dp group's.
        zero: stage 1, 2 or 3.
    """

    def __init__(self, model: Decoder, channel: Channel, zero: int) -> None:
        self.model, self.channel, self.zero = model, channel, zero
        self.last_micro_batch = True
        self.groups = [_Group([model.embed]), *(_Group([unit]) for unit in model.units)]
        self.groups.append(_Group([model.norm, model.head_loss]))
        self.bound = False
        for i, group in enumerate(self.groups):
            group.modules[0].register_forward_pre_hook(lambda *_, i=i: self._before_forward(i))
            group.modules[-1].register_forward_hook(lambda *_, i=i: self._after_forward(i))
            group.modules[-1].register_full_backward_pre_hook(lambda *_, i=i: self._before_backward(i))

    def begin_micro_batch(self, last: bool) -> None:
        """Say whether the micro-batch that begins is the step's last: ZeRO-1 scatters only then."""
        self.last_micro_batch = last

    def finish(self) -> None:
        """End a step's backward: wait for all gradients; modules see shards again, with their gradients."""
        for group in self.groups:
            self._settle(group, "tail")
            self._drop(group)
            for parameter in group.parameters:
                parameter.use_shard()

    def prefetch(self) -> None:
        """Start gathering the first groups; called when the optimizer has changed the shards."""
        for group in self.groups[: 1 + AHEAD] if self.bound else ():
            self._gather(group)

    def _bind(self) -> None:
        members = [(group, part) for group in self.groups for part in group.modules]
        group_of = {id(module): group for group, part in members for module in part.modules()}
        for owners in parameters_with_owners(self.model):
            parameter = ShardedParameter(owners, self.model.dtype, self.channel)
            group = group_of[id(owners[0][0])]
            parameter.on_gradient(lambda parameter, group=group: self._scatter(group, parameter))
            group.parameters.append(parameter)
        self.bound = True

    def _before_forward(self, i: int) -> None:
        if not self.bound:
            self._bind()
        for group in self.groups[i : i + 1 + AHEAD]:
            self._gather(group)
        self._arrive(self.groups[i], "head" if i <= 1 else "middle")

    def _after_forward(self, i: int) -> None:
        tied = self.model.spec.tie_embeddings and i == 0
        if self.zero == 3 and i < len(self.groups) - 1 and not tied:
            self._drop(self.groups[i])

    def _before_backward(self, i: int) -> None:
        if i + 1 < len(self.groups) and self.zero == 3:
            self._drop(self.groups[i + 1])
        for group in self.groups[max(i - AHEAD, 1) : i + 1][::-1]:  # an embedding's backward needs no table
            self._gather(group)
        self._arrive(self.groups[i], "middle")
        if i + BEHIND < len(self.groups) and self.zero > 1:
            self._settle(self.groups[i + BEHIND], "middle")

    def _gather(self, group: _Group) -> None:
        """Start the group's messages, unless it is whole or on its way."""
        if group.whole or group.gathering is not None:
            return
        messages = [message for parameter in group.parameters for message in parameter.gather()]
        counted = self.channel.evidence.operators[GATHER]
        counted.calls += 1
        group.started_s = perf_counter()
        group.gathering = self._post(GATHER, messages)

    def _arrive(self, group: _Group, where: str) -> None:
        """Wait until the group is whole, and let its modules see whole parameters."""
        if group.gathering is not None:
            with self.channel.evidence.waiting(GATHER, where, self.channel.device):
                for work in group.gathering:
                    work.wait()
            name = f"{GATHER}: group {self.groups.index(group)}"
            self.channel.evidence.span("message", name, group.started_s, perf_counter())
            group.gathering, group.whole = None, True
        if group.whole:
            for parameter in group.parameters:
                parameter.use_whole()

    def _drop(self, group: _Group) -> None:
        if group.gathering is not None:  # never leave a message without its wait
            self._arrive(group, "middle")
        group.whole = False
        for parameter in group.parameters:
            parameter.free()

    def _scatter(self, group: _Group, parameter: ShardedParameter) -> None:
        """Send a gradient that has just been made to the owners of its rows."""
        if self.zero == 1 and not self.last_micro_batch:
            return
        gradient = parameter.take_gradient()
        received, messages = parameter.scatter(gradient)
        counted = self.channel.evidence.operators[SCATTER]
        counted.calls += 1
        counted.overlapped_calls += 1
        started = perf_counter()
        works = self._post(SCATTER, messages)
        group.scatters.append(_Scatter(parameter, gradient, received, works, started))

    def _settle(self, group: _Group, where: str) -> None:
        """Wait for the group's gradients and add the contributions in rank order."""
        for scatter in group.scatters:
            with self.channel.evidence.waiting(SCATTER, where, self.channel.device):
                for work in scatter.works:
                    work.wait()
            name = f"{SCATTER}: {tuple(scatter.gradient.shape)}"
            self.channel.evidence.span("message", name, scatter.started_s, perf_counter())
            scatter.parameter.add_gradient(_sum_by_rank(scatter.received))
        group.scatters.clear()

    def _post(self, operator: str, messages: Sequence[tuple[bool, Tensor, int]]) -> list[dist.Work]:
        counted = self.channel.evidence.operators[operator]
        counted.messages += sum(outgoing for outgoing, _, _ in messages)
        counted.bytes_sent += sum(buffer.nbytes for outgoing, buffer, _ in messages if outgoing)
        return self.channel.post(messages) if messages else []


def _sum_by_rank(received: Tensor) -> Tensor:
    """Sum of (n, rows, ...) over n, from rank 0 up, in fp32 or better."""
    total = received[0].to(accumulation_dtype(received.dtype))
    for contribution in received[1:]:
        total = total + contribution
    return total

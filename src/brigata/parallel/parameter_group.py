"""Parameters that are used together: gathered together, their gradients scattered as they appear."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from brigata.overlap.channel import Channel
from brigata.parallel.messages import GATHER, SCATTER, Message, post_counted, turns
from brigata.parallel.replicas import ReplicaSum
from brigata.parallel.sharded_parameter import ShardedParameter

RowsProduct = Callable[[int, slice, Tensor, bool], None]
"""Compute rows of the n-th weight's gradient into the tensor given, or (True) add them to it."""


@dataclass
class _Scatter:
    """One gradient on its way: ``received[r]`` is rank r's contribution to the rows that are owned here."""

    parameter: ShardedParameter
    gradient: Tensor
    received: dict[int, Tensor]
    works: list[dist.Work]
    started_s: float


class ParameterGroup:
    """The parameters of some modules, where they stand, and the messages that move them.

    Args:
        modules: what uses the parameters, in order of use.
        place: 0 is the embedding's, then one a unit, the last one the head's.
        channel: of the ranks that share out the rows.
        replicas: channel of the ranks that own the same rows; None when nobody does.
    """

    def __init__(
        self, modules: Sequence[nn.Module], place: int, channel: Channel, replicas: Channel | None
    ) -> None:
        self.modules, self.place, self.channel, self.replicas = modules, place, channel, replicas
        self.evidence = channel.evidence
        self.parameters: list[ShardedParameter] = []
        self.whole = False
        self.in_parts = False
        """Its module waits for each rank's rows by itself, in ``arrivals``."""
        self.holding = False
        """Gradients stay here whole for now: ZeRO-1 ahead of a step's last micro-batch."""
        self._gathering: dict[int, list[dist.Work]] | None = None
        self._started_s = 0.0
        self._scatters: list[_Scatter] = []
        self._later: list[Callable[[], None]] = []
        self._replica_sum: ReplicaSum | None = None
        self._summed = False

    def bind(self, parameters: Sequence[ShardedParameter]) -> None:
        """Take over ``parameters``; the gradients of their own rows lie side by side in one tensor."""
        self.parameters = list(parameters)
        trained = [parameter for parameter in parameters if parameter.shard.requires_grad]
        sizes = [parameter.local.numel() for parameter in trained]
        self.gradient = trained[0].local.new_zeros(sum(sizes)) if trained else None
        shares = () if self.gradient is None else self.gradient.split(sizes)
        for parameter, memory in zip(trained, shares, strict=True):
            parameter.hold_gradient_in(memory)
            parameter.on_gradient(self._scatter)

    def gather(self) -> None:
        """Start the messages that make the group whole, unless it is or they are on their way."""
        if self.whole or self._gathering is not None:
            return
        self.evidence.operators[GATHER].calls += 1
        self._started_s = perf_counter()
        for parameter in self.parameters:
            parameter.fill_own_rows()
        self._gathering = {}
        for to, source in turns(self.channel):
            messages = [m for parameter in self.parameters for m in parameter.gather(to, source)]
            self._gathering[source] = post_counted(self.channel, GATHER, messages)

    def arrive(self, where: str) -> None:
        """Wait until the group is whole, and let its modules see whole parameters."""
        for _ in self.arrivals(where):
            pass
        self.show_whole()

    def show_whole(self) -> None:
        """Let the modules see whole parameters, though rows of other ranks may still be under way."""
        for parameter in self.parameters:
            parameter.use_whole()

    def arrivals(self, where: str) -> Iterator[int]:
        """Ranks whose rows have arrived, the own first, each other one after the wait for it.

        Nothing when the group is whole. The iterator must be used up.
        """
        if self._gathering is None:
            return
        yield self.channel.rank
        for source, works in self._gathering.items():
            with self.evidence.waiting(GATHER, where, self.channel.device):
                _wait(works)
            yield source
        self.evidence.span("message", f"{GATHER}: place {self.place}", self._started_s, perf_counter())
        self._gathering, self.whole = None, True

    def drop(self, free: bool) -> None:
        """Take the whole parameters for out of date; ``free``: give their memory back too."""
        if self._gathering is not None:  # never leave a message without its wait
            self.arrive("middle")
        self.whole = False
        if free:
            for parameter in self.parameters:
                parameter.free()

    def _scatter(self, parameter: ShardedParameter) -> None:
        """Send a new gradient to the owners of its rows, unless its slices have left already."""
        gradient = None if self.holding else parameter.take_gradient()
        if gradient is None:
            return
        scatter = self._begin_scatter(parameter, gradient)
        messages: list[Message] = []
        for to, source in turns(self.channel):
            messages += parameter.scatter(gradient, scatter.received, to, source)
        scatter.works += post_counted(self.channel, SCATTER, messages)

    def scatter_by_owner(self, chosen: Sequence[tuple[int, ShardedParameter]], product: RowsProduct) -> None:
        """Compute the gradients' rows that others own and send each the moment it is there.

        The own rows are computed in ``finish_slices``.

        Args:
            chosen: weights of the group that want a gradient, each with its number for ``product``.
            product: computes rows of a gradient.
        """
        scatters = []
        for _, parameter in chosen:
            held = parameter.take_gradient()
            gradient = parameter.memory.new_empty(parameter.memory.shape) if held is None else held
            scatters.append((self._begin_scatter(parameter, gradient), held is not None))

        def compute(rank: int) -> None:
            with self.evidence.computing(SCATTER, f"rows of rank {rank}"):
                for (n, parameter), (scatter, add) in zip(chosen, scatters, strict=True):
                    rows = parameter.span(rank)
                    product(n, rows, scatter.gradient[rows], add)

        for to, source in turns(self.channel):
            compute(to)
            messages: list[Message] = []
            for scatter, _ in scatters:
                messages += scatter.parameter.scatter(scatter.gradient, scatter.received, to, source)
            works = post_counted(self.channel, SCATTER, messages)
            for scatter, _ in scatters[:1]:  # a handle is waited for once
                scatter.works += works
        self._later.append(lambda: compute(self.channel.rank))

    @torch.no_grad()
    def finish_slices(self) -> None:
        """Compute the own rows that ``scatter_by_owner`` has left."""
        for compute in self._later:
            compute()
        self._later.clear()

    def settle(self, where: str) -> None:
        """Wait for the other ranks' contributions to the own rows and add them up in rank order."""
        assert not self._later
        for scatter in self._scatters:
            with self.evidence.waiting(SCATTER, where, self.channel.device):
                _wait(scatter.works)
            name = f"{SCATTER}: {tuple(scatter.gradient.shape)}"
            self.evidence.span("message", name, scatter.started_s, perf_counter())
            scatter.parameter.add_gradient(scatter.gradient, scatter.received)
        self._scatters.clear()

    def begin_replica_sum(self) -> None:
        """Start summing the own rows' gradients over the replicas, unless that was done already."""
        if self.replicas is not None and self.gradient is not None and not self._summed:
            self._replica_sum = ReplicaSum(self.gradient, self.replicas)
            self._summed = True

    def continue_replica_sum(self, where: str) -> None:
        """Among more than two replicas, send on what has been summed here."""
        if self._replica_sum is not None and self._replica_sum.channel.size > 2:
            self._replica_sum.send_back(where)

    def finish_replica_sum(self, where: str) -> None:
        """Wait until the own rows' gradients are the sums over the replicas."""
        if self._replica_sum is not None:
            self._replica_sum.finish(where)
        self._replica_sum = None

    def _begin_scatter(self, parameter: ShardedParameter, gradient: Tensor) -> _Scatter:
        if self._summed and parameter.shard.grad is not None:
            raise RuntimeError(
                "a gradient came after the sum over replicas: call begin_micro_batch(last=False) ahead of "
                "every micro-batch but a step's last one, and zero_grad() after each step"
            )
        self._summed = False
        counted = self.evidence.operators[SCATTER]
        counted.calls += 1
        counted.overlapped_calls += 1
        scatter = _Scatter(parameter, gradient, {}, [], perf_counter())
        self._scatters.append(scatter)
        return scatter


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()

"""Data parallelism by our own ZeRO engine: parameters gathered ahead, gradients scattered as they appear.

Parameters that are used together (the embedding, each unit, the last norm with the head) form a group. A
group is gathered by point-to-point messages while the group before it computes, and each weight gradient
leaves for its owners the moment its operator has made it, while the backward goes on.

    ZeRO-1   whole parameters and whole gradients during a step; gradients are scattered in its last
             micro-batch
    ZeRO-2   gradients are scattered in every micro-batch
    ZeRO-3   parameters are dropped after a group's forward and gathered again for its backward

With replicas (hybrid sharded data parallelism, HSDP) all this happens inside a shard group; in a step's last
micro-batch each group's gradients are summed over the replicas as soon as the shard group's sum is known.

Source of the stages: Rajbhandari et al., arXiv 1910.02054; of HSDP: Zhao et al., arXiv 2304.11277.
"""

from torch import nn

from brigata.model.decoder import Decoder
from brigata.model.parts import Projections
from brigata.model.unit import Unit
from brigata.overlap.channel import Channel
from brigata.parallel.owner_slices import OwnerSlicedProjections
from brigata.parallel.parameter_group import ParameterGroup
from brigata.parallel.sharded_parameter import ShardedParameter, parameters_with_owners

AHEAD = 2
"""Places that are gathered before they are needed. A Transformer layer is two units, and a feed-forward's
weights may take longer to arrive than the attention before it takes to compute."""
BEHIND = 4
"""Places whose gradients may be under way when another place's backward begins; bounds memory."""
BEHIND_WITH_REPLICAS = 2
"""The same where a sum over replicas waits for them: the links inside a shard group are the quick ones."""


class DataEngine:
    """Runs ``model`` under ZeRO: hooks on its groups gather and scatter; the loop calls the public methods.

    Args:
        model: parameters already cut over the dp axis by ``shard_over_data``; they may still be on the meta
            device and are looked up at the first forward.
        channel: of the ranks that share out the rows.
        replicas: of the ranks that own the same rows; None when nobody does.
        zero: stage 1, 2 or 3.
        slice_by_owner: slice the first unit's input projections by the owners of their rows. Where tensor
            parallelism has swapped that part, its products run inside an overlapped operator already and stay
            as they are.
    """

    def __init__(
        self,
        model: Decoder,
        channel: Channel,
        replicas: Channel | None,
        zero: int,
        slice_by_owner: bool = True,
    ) -> None:
        self.model, self.channel, self.replicas, self.zero = model, channel, replicas, zero
        self.last_micro_batch = True
        self.behind = BEHIND
        if replicas is not None:
            self.behind = BEHIND_WITH_REPLICAS if channel.size > 1 else 1
        self.bound = False
        self.groups: list[ParameterGroup] = []
        self._group(0, model.embed, *([model.positions] if hasattr(model, "positions") else []))
        for i, unit in enumerate(model.units):
            assert isinstance(unit, Unit)
            part = getattr(unit.block, "project_in", None)
            if i == 0 and slice_by_owner and channel.size > 1 and type(part) is Projections:
                self._group(1, unit.norm)
                group = self._group(1, part)
                group.in_parts = True
                sliced = OwnerSlicedProjections(part, group)
                unit.block.set_submodule("project_in", sliced)
                group.modules = [sliced]
                self._group(1, unit.block.mix, unit.block.project_out, unit.norm_after)
            else:
                self._group(i + 1, unit)
        self._group(len(model.units) + 1, model.norm, model.head_loss)
        for i, group in enumerate(self.groups):
            group.modules[0].register_forward_pre_hook(lambda *_, i=i: self._before_forward(i))
            group.modules[-1].register_forward_hook(lambda *_, i=i: self._after_forward(i))
            group.modules[-1].register_full_backward_pre_hook(lambda *_, i=i: self._before_backward(i))

    def begin_micro_batch(self, last: bool) -> None:
        """Say whether the micro-batch that begins is the step's last: without a call, it is."""
        self.last_micro_batch = last
        for group in self.groups:
            group.finish_slices()
            group.holding = self.zero == 1 and not last

    def finish(self) -> None:
        """End a step's backward: wait for all gradients; modules see shards again, with their gradients."""
        backward = self.groups[::-1]
        for group in backward:
            group.finish_slices()
        for group in backward:
            group.settle("tail")
            group.begin_replica_sum()
        for group in backward:
            group.continue_replica_sum("tail")
        for group in backward:
            group.finish_replica_sum("tail")
        for group in self.groups:
            group.drop(free=self.zero == 3)
            for parameter in group.parameters:
                parameter.use_shard()

    def prefetch(self) -> None:
        """Start gathering the first groups; called when the optimizer has changed the shards."""
        if self.bound:
            self._gather_ahead(0)

    def _group(self, place: int, *modules: nn.Module) -> ParameterGroup:
        self.groups.append(ParameterGroup(modules, place, self.channel, self.replicas))
        return self.groups[-1]

    def _bind(self) -> None:
        members = [(group, part) for group in self.groups for part in group.modules]
        group_of = {id(module): group for group, part in members for module in part.modules()}
        parameters: dict[ParameterGroup, list[ShardedParameter]] = {group: [] for group in self.groups}
        for owners in parameters_with_owners(self.model):
            parameter = ShardedParameter(owners, self.model.dtype, self.channel, resident=self.zero < 3)
            parameters[group_of[id(owners[0][0])]].append(parameter)
        for group, own in parameters.items():
            group.bind(own)
        self.bound = True

    def _gather_ahead(self, place: int) -> None:
        for group in self.groups:
            if place <= group.place <= place + AHEAD:
                group.gather()

    def _before_forward(self, i: int) -> None:
        if not self.bound:
            self._bind()
        group = self.groups[i]
        self._gather_ahead(group.place)
        if group.in_parts:
            group.show_whole()
        else:
            group.arrive("head" if group.place <= 1 else "middle")

    def _after_forward(self, i: int) -> None:
        tied = self.model.spec.tie_embeddings and i == 0
        if self.zero == 3 and i < len(self.groups) - 1 and not tied:
            self.groups[i].drop(free=True)

    def _before_backward(self, i: int) -> None:
        place = self.groups[i].place
        if i + 1 < len(self.groups) and self.zero == 3:
            self.groups[i + 1].drop(free=True)
        for group in self.groups[i::-1]:
            if 0 < group.place >= place - AHEAD:  # an embedding's backward needs no table
                group.gather()
        self.groups[i].arrive("middle")
        for group in self.groups[:i:-1]:
            if group.place >= place + self.behind + BEHIND:
                group.continue_replica_sum("middle")
            elif group.place >= place + self.behind:
                group.settle("middle")
                if self.last_micro_batch:
                    group.begin_replica_sum()

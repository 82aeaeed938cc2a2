"""One parameter under ZeRO: the rows that a rank keeps, and the whole while it is needed."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from brigata.model.experts import Router
from brigata.overlap.channel import Channel
from brigata.overlap.executor import accumulation_dtype
from brigata.parallel.local import local_class
from brigata.parallel.mesh import data_axes
from brigata.parallel.sharding import local_shard

Owner = tuple[nn.Module, str]
"""A module and the name under which it uses a parameter."""


def parameters_with_owners(model: nn.Module) -> list[list[Owner]]:
    """For each parameter, in order of first use, all modules that use it: several where weights are tied."""
    owners: dict[int, list[Owner]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    return list(owners.values())


def shard_over_data(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut every parameter by rows over ``mesh``'s data-parallel axis, after tensor parallelism; in place.

    Args:
        model: whole parameters, or DTensors on the tp axis; real or on the meta device.
        mesh: with the axes dp and tp, or dp_replicate, dp_shard and tp.
    """
    data = data_axes(mesh)
    for owners in parameters_with_owners(model):
        module, name = owners[0]
        parameter = module.get_parameter(name)
        axes = data
        placements: list[Placement] = [*(Replicate() for _ in data[1:]), Shard(0)]
        local = parameter.detach()
        if isinstance(parameter, DTensor):
            (cut,) = parameter.placements
            if cut.is_shard(0):
                placements[-1] = _StridedShard(0, split_factor=mesh["tp"].size())
            axes = (*data, "tp")
            placements.append(cut)
            local = parameter.to_local().detach()
        rows = local_shard(local, mesh[data[-1]], (Shard(0),)).clone()
        sharded = DTensor.from_local(
            rows,
            mesh[axes],
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        replaced = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        for module, name in owners:
            module._parameters[name] = replaced


class ShardedParameter:
    """A parameter's shard, as the optimizer knows it, and its whole form, as the modules use it.

    The whole form is always the same ``nn.Parameter``; its memory comes and goes. Messages are written
    through an alias with a version counter of its own, because autograd must not take a repeated gather for
    a change.

    Args:
        owners: all modules that use it.
        dtype: of the products, and so of the whole form and of the messages; shards keep their own. Vectors
            and what a router chooses by keep theirs in every form: they are used in full precision.
        channel: of the ranks that share out the rows.
        resident: the whole's memory stays between steps (ZeRO-1 and 2). A shard of the same dtype then lies
            in it, and needs no copy.
    """

    def __init__(self, owners: Sequence[Owner], dtype: torch.dtype, channel: Channel, resident: bool) -> None:
        self.owners, self.channel = list(owners), channel
        module, name = self.owners[0]
        shard = module._parameters[name]
        assert isinstance(shard, DTensor)
        if shard.ndim == 1 or local_class(module) is Router:
            dtype = shard.dtype
        self.shard: nn.Parameter = shard  # type: ignore[assignment]
        self.local: Tensor = shard.to_local().detach()
        mesh = shard.device_mesh
        tensor_axis = shard.placements[len(data_axes(mesh)) :]
        total = shard.shape[0]
        if tensor_axis and tensor_axis[0].is_shard(0):
            total //= mesh["tp"].size()
        sizes = [len(share) for share in torch.empty(total, device="meta").chunk(channel.size)]
        self.rows = sizes + [0] * (channel.size - len(sizes))
        buffer = self.local.new_empty((total, *self.local.shape[1:]), dtype=dtype)
        whole: Tensor = buffer
        if tensor_axis:
            whole = DTensor.from_local(buffer, mesh["tp"], tensor_axis, run_check=False)
        self.whole = nn.Parameter(whole, requires_grad=shard.requires_grad)
        self.memory: Tensor = buffer.data
        self.bytes = buffer.untyped_storage().nbytes()
        if not resident:
            self.free()
        elif dtype == self.local.dtype:
            self._move_shard_into_whole()

    def _move_shard_into_whole(self) -> None:
        own = self.memory[self.span(self.channel.rank)]
        own.copy_(self.local)
        assert isinstance(self.shard, DTensor)
        self.shard._local_tensor = self.local = own

    def on_gradient(self, call: Callable[["ShardedParameter"], None]) -> None:
        """Call ``call`` with this parameter whenever a backward has made its whole gradient."""
        self.whole.register_post_accumulate_grad_hook(lambda _: call(self))

    def span(self, rank: int) -> slice:
        """Rows of the whole that ``rank`` owns."""
        start = sum(self.rows[:rank])
        return slice(start, start + self.rows[rank])

    def use_shard(self) -> None:
        """Let the modules, and so ``named_parameters``, see the shard."""
        self._show(self.shard)

    def use_whole(self) -> None:
        """Let the modules see the whole."""
        self._show(self.whole)

    def _show(self, parameter: nn.Parameter) -> None:
        for module, name in self.owners:
            module._parameters[name] = parameter

    def free(self) -> None:
        """Give the whole's memory back."""
        self.memory.untyped_storage().resize_(0)

    def fill_own_rows(self) -> None:
        """Take memory for the whole and put the own rows in place, unless they are there."""
        if self.memory.untyped_storage().nbytes() != self.bytes:
            self.memory.untyped_storage().resize_(self.bytes)
        own = self.memory[self.span(self.channel.rank)]
        if own.data_ptr() != self.local.data_ptr():
            own.copy_(self.local)

    def gather(self, to: int, source: int) -> list[tuple[bool, Tensor, int]]:
        """The messages that take the own rows to one rank and bring those of another."""
        own, theirs = self.memory[self.span(self.channel.rank)], self.memory[self.span(source)]
        return [*([(True, own, to)] if len(own) else []), *([(False, theirs, source)] if len(theirs) else [])]

    def take_gradient(self) -> Tensor | None:
        """The whole gradient that is here, contiguous, or None; the parameter forgets it."""
        gradient, self.whole.grad = self.whole.grad, None
        return None if gradient is None else _local(gradient).contiguous()

    def scatter(
        self, gradient: Tensor, received: dict[int, Tensor], to: int, source: int
    ) -> list[tuple[bool, Tensor, int]]:
        """The messages that take one rank its rows of ``gradient`` and bring another's contribution to ours.

        ``received`` gets the room for the contribution, under ``source``.
        """
        theirs, rows = gradient[self.span(to)], self.rows[self.channel.rank]
        received[source] = gradient.new_empty((rows, *gradient.shape[1:]))
        messages = [(True, theirs, to)] if len(theirs) else []
        return [*messages, (False, received[source], source)] if rows else messages

    def hold_gradient_in(self, memory: Tensor) -> None:
        """Keep the own rows' gradient in ``memory``, flat, in the shard's dtype, from now on."""
        shard = self.shard
        assert isinstance(shard, DTensor)
        self.sum = memory.view(self.local.shape)
        self.gradient = DTensor.from_local(
            self.sum,
            shard.device_mesh,
            shard.placements,
            run_check=False,
            shape=shard.shape,
            stride=shard.stride(),
        )

    def add_gradient(self, gradient: Tensor, received: Mapping[int, Tensor]) -> None:
        """Add a micro-batch's gradient of the own rows to the shard's: contributions summed in rank order.

        Args:
            gradient: ours, whole.
            received: the other ranks' contributions to the own rows.
        """
        me, wide = self.channel.rank, accumulation_dtype(gradient.dtype)
        assert self.sum.dtype == wide, f"{gradient.dtype} gradients of {self.sum.dtype} parameters"
        terms = {**received, me: gradient[self.span(me)]}
        total, *others = (terms[rank].to(wide) for rank in sorted(terms))
        first = self.shard.grad is None
        if others:
            total = torch.add(total, others[0], out=self.sum if first else None)
        for other in others[1:]:
            total.add_(other)
        if not first:
            self.sum.add_(total)
        elif not others:
            self.sum.copy_(total)
        self.shard.grad = self.gradient


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()

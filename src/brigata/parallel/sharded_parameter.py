"""One parameter under ZeRO: the rows that a dp rank keeps, and the whole while it is needed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from brigata.overlap.channel import Channel
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
    """Cut every parameter by rows over ``mesh``'s dp axis, after tensor parallelism has cut it; in place.

    Args:
        model: whole parameters, or DTensors on the tp axis; real or on the meta device.
        mesh: with the axes dp and tp.
    """
    for owners in parameters_with_owners(model):
        module, name = owners[0]
        parameter = module.get_parameter(name)
        axes: tuple[str, ...] = ("dp",)
        placements: list[Placement] = [Shard(0)]
        local = parameter.detach()
        if isinstance(parameter, DTensor):
            (cut,) = parameter.placements
            axes = ("dp", "tp")
            placements = [
                _StridedShard(0, split_factor=mesh["tp"].size()) if cut.is_shard(0) else Shard(0),
                cut,
            ]
            local = parameter.to_local().detach()
        rows = local_shard(local, mesh["dp"], (Shard(0),)).clone()
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
        dtype: of the whole form and so of the messages; shards keep their own.
        channel: the dp group's.
    """

    def __init__(self, owners: Sequence[Owner], dtype: torch.dtype, channel: Channel) -> None:
        self.owners, self.channel = list(owners), channel
        module, name = self.owners[0]
        shard = module._parameters[name]
        assert isinstance(shard, DTensor)
        self.shard: nn.Parameter = shard  # type: ignore[assignment]
        local = shard.to_local().detach()
        tensor_axis = shard.placements[1:]
        total = shard.shape[0]
        if tensor_axis and tensor_axis[0].is_shard(0):
            total //= shard.device_mesh.size(1)
        sizes = [len(share) for share in torch.empty(total, device="meta").chunk(channel.size)]
        self.rows = sizes + [0] * (channel.size - len(sizes))
        buffer = local.new_empty((total, *local.shape[1:]), dtype=dtype)
        whole: Tensor = buffer
        if tensor_axis:
            whole = DTensor.from_local(buffer, shard.device_mesh["tp"], tensor_axis, run_check=False)
        self.whole = nn.Parameter(whole, requires_grad=shard.requires_grad)
        self.memory = buffer.data
        self.bytes = buffer.untyped_storage().nbytes()
        self.free()

    def on_gradient(self, call: Callable[["ShardedParameter"], None]) -> None:
        """Call ``call`` with this parameter whenever a backward has made its whole gradient."""
        if self.whole.requires_grad:
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

    def gather(self) -> list[tuple[bool, Tensor, int]]:
        """Take memory, put the own rows in place, and name the messages that bring the others."""
        self.memory.untyped_storage().resize_(self.bytes)
        me, n = self.channel.rank, self.channel.size
        own = self.memory[self.span(me)]
        own.copy_(_local(self.shard))
        messages = []
        for i in range(1, n):
            to, source = (me + i) % n, (me - i) % n
            if len(own):
                messages.append((True, own, to))
            if self.rows[source]:
                messages.append((False, self.memory[self.span(source)], source))
        return messages

    def take_gradient(self) -> Tensor:
        """The whole gradient, contiguous; the parameter forgets it."""
        gradient = self.whole.grad
        assert gradient is not None
        self.whole.grad = None
        return _local(gradient).contiguous()

    def scatter(self, gradient: Tensor) -> tuple[Tensor, list[tuple[bool, Tensor, int]]]:
        """Room (n, rows, ...) for every rank's contribution to the own rows, ours in it; and the messages."""
        me, n = self.channel.rank, self.channel.size
        received = gradient.new_empty((n, self.rows[me], *gradient.shape[1:]))
        received[me] = gradient[self.span(me)]
        messages = []
        for i in range(1, n):
            to, source = (me + i) % n, (me - i) % n
            if self.rows[to]:
                messages.append((True, gradient[self.span(to)], to))
            if self.rows[me]:
                messages.append((False, received[source], source))
        return received, messages

    def add_gradient(self, total: Tensor) -> None:
        """Add a micro-batch's summed gradient of the own rows to the shard's, in the shard's dtype."""
        local = _local(self.shard)
        total = total.to(local.dtype)
        if self.shard.grad is not None:
            _local(self.shard.grad).add_(total)
            return
        shard = self.shard
        assert isinstance(shard, DTensor)
        self.shard.grad = DTensor.from_local(
            total,
            shard.device_mesh,
            shard.placements,
            run_check=False,
            shape=shard.shape,
            stride=shard.stride(),
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()

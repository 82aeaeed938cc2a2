"""What the styles make of a foreign model's modules: the same parameters as DTensors, forwards that overlap.

A module keeps its place and its name; its class is replaced (``become``). Tensors enter and leave as plain
shares or as DTensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor

from brigata.overlap.all_reduce import column_linear, linear_all_reduce
from brigata.overlap.channel import Channel
from brigata.overlap.linear import all_gather_linear, linear_reduce_scatter

FEATURES = Shard(-1)
"""Each rank holds a share of the last dim."""


@dataclass(frozen=True)
class Ends:
    """How the tensors at both ends of a module lie over ``mesh``; ``local``: plain tensors leave it."""

    style: str
    mesh: DeviceMesh
    entry: Placement
    exit: Placement
    local: bool

    def enter(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """This rank's share of ``x`` and the shape of the whole; of plain tensors all ranks hold as much."""
        shape = list(x.shape)
        if not isinstance(x, DTensor):
            if isinstance(self.entry, Shard):
                shape[self.entry.dim] *= self.mesh.size()
            return _for_products(x), shape
        if x.device_mesh != self.mesh or x.placements != (_counted_up(self.entry, x.ndim),):
            raise ValueError(
                f"{self.style}: the input is {x.placements} over {x.device_mesh}, not {self.entry} over "
                f"{self.mesh}; redistribute it or set input_layouts"
            )
        return _for_products(x.to_local()), shape

    def leave(self, y: Tensor, held: Placement, shape: list[int]) -> Tensor:
        """``y``, this rank's share ``held`` of a tensor of ``shape``, in the layout that was asked for."""
        if self.local and held == self.exit:
            return y
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(
            y, self.mesh, [held], run_check=False, shape=torch.Size(shape), stride=stride
        )
        if held != self.exit:
            whole = whole.redistribute(placements=[self.exit])
        return whole.to_local() if self.local else whole


def _counted_up(placement: Placement, ndim: int) -> Placement:
    """``placement`` as DTensors write it, with a dim from 0."""
    return Shard(placement.dim % ndim) if isinstance(placement, Shard) else placement


def _for_products(x: Tensor) -> Tensor:
    """``x`` in the dtype in which ``nn.Linear`` would multiply it under autocast."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _local(parameter: Tensor, partial: bool = False) -> Tensor:
    """The share of a DTensor parameter that is here; ``partial``: its gradient is still to be summed."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial()] if partial else None)


@dataclass(frozen=True)
class _Sequence:
    """A tensor's dim of positions, of which each rank has some: (..., S, ..., D) <-> tokens (S * others, D).

    Tokens follow each other by position first, so that each rank's positions are one chunk of tokens for
    several sequences too (then at the price of a copy).
    """

    shape: list[int]
    dim: int
    positions: list[int]

    @classmethod
    def of(cls, ends: Ends, cut: Shard, shape: list[int]) -> "_Sequence":
        """Of a tensor of ``shape`` whose dim ``cut.dim`` is cut as DTensors (and ``torch.chunk``) cut it."""
        dim, ranks = cut.dim % len(shape), ends.mesh.size()
        if dim == len(shape) - 1:
            raise ValueError(
                f"{ends.style}: {cut} cuts the features of a tensor of {len(shape)} dims, not a sequence; "
                f"use an earlier dim"
            )
        share = -(-shape[dim] // ranks)
        return cls(shape, dim, [max(0, min(share, shape[dim] - r * share)) for r in range(ranks)])

    @property
    def others(self) -> list[int]:
        """Sizes of the dims that are neither positions nor features."""
        return [size for dim, size in enumerate(self.shape[:-1]) if dim != self.dim]

    @property
    def rows(self) -> list[int]:
        """Tokens of each rank."""
        return [positions * prod(self.others) for positions in self.positions]

    def tokens(self, x: Tensor) -> Tensor:
        """``x``, some or all positions, as tokens."""
        return x.movedim(self.dim, 0).reshape(-1, x.shape[-1])

    def restore(self, tokens: Tensor, positions: int) -> Tensor:
        """Tokens of ``positions``, in the tensor's own order of dims and contiguous."""
        stacked = tokens.view(positions, *self.others, tokens.shape[1])
        return stacked.movedim(0, self.dim).contiguous()


class ColumnLinear(nn.Linear):
    """What ``OverlappedColwise`` makes of an ``nn.Linear``: weight (F/n, D) and bias (F/n,) on each rank."""

    ends: Ends
    channel: Channel
    keep_gathered: bool

    def forward(self, input: Tensor) -> Tensor:
        """Input (..., D), whole or cut by positions -> (..., F/n) of all positions."""
        x, shape = self.ends.enter(input)
        weight = _local(self.weight)
        if isinstance(self.ends.entry, Shard):
            sequence = _Sequence.of(self.ends, self.ends.entry, shape)
            tokens = sequence.tokens(x)
            (y,) = all_gather_linear(tokens, [weight], self.channel, sequence.rows, self.keep_gathered)
            y = sequence.restore(y, shape[sequence.dim])
        else:
            (y,) = column_linear(x.reshape(-1, x.shape[-1]), [weight], self.channel)
            y = y.view(*shape[:-1], y.shape[1])
        if self.bias is not None:
            y = y + _local(self.bias).to(y.dtype)
        return self.ends.leave(y, FEATURES, [*shape[:-1], self.out_features])


class RowLinear(nn.Linear):
    """What ``OverlappedRowwise`` makes of an ``nn.Linear``: weight (D, F/n) on each rank, the bias on all."""

    ends: Ends
    channel: Channel

    def forward(self, input: Tensor) -> Tensor:
        """Input (..., F/n) of all positions -> (..., D), whole or cut by positions."""
        x, shape = self.ends.enter(input)
        weight = _local(self.weight)
        if x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"{self.ends.style}: the input has {x.shape[-1]} features, this rank's share of the weight "
                f"{weight.shape[1]} of {self.in_features}; cut the input (OverlappedColwise ahead of it does)"
            )
        if isinstance(self.ends.exit, Shard):
            sequence = _Sequence.of(self.ends, self.ends.exit, shape)
            if self.ends.local and len(set(sequence.positions)) > 1:
                raise ValueError(
                    f"{self.ends.style}: {shape[sequence.dim]} positions do not divide over "
                    f"{self.channel.size} ranks, and a plain tensor does not tell what follows; pad the "
                    f"sequence or set use_local_output=False"
                )
            y = linear_reduce_scatter(sequence.tokens(x), weight, self.channel, sequence.rows)
            y = sequence.restore(y, sequence.positions[self.channel.rank])
        else:
            y = linear_all_reduce(x.reshape(-1, x.shape[-1]), weight, self.channel)
            y = y.view(*shape[:-1], y.shape[1])
        if self.bias is not None:
            y = y + _local(self.bias, partial=isinstance(self.ends.exit, Shard)).to(y.dtype)
        return self.ends.leave(y, self.ends.exit, [*shape[:-1], self.out_features])


class PerToken(nn.Module):
    """What ``OverlappedSequence`` puts ahead of a module's class: its forward sees this rank's tokens."""

    ends: Ends

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Input (..., S/n, ..., D) -> the same."""
        x, shape = self.ends.enter(input)
        parameters = {name: p for name, p in self._parameters.items() if p is not None}
        shares: dict[str, Any] = {name: _local(p, partial=True) for name, p in parameters.items()}
        self._parameters.update(shares)  # the module's own forward may be a kernel that knows no DTensor
        try:
            y = super().forward(x, *args, **kwargs)
        finally:
            self._parameters.update(parameters)
        return self.ends.leave(y, self.ends.exit, shape)


def become(
    module: nn.Module,
    kind: type[nn.Module],
    ends: Ends,
    placements: Mapping[str, Placement],
    source: int | None,
    **attributes: Any,
) -> None:
    """Cut the parameters of ``module`` and make it a ``kind``, in place.

    Args:
        module: not changed before; its class is replaced, whatever else it has stays.
        kind: its new class.
        ends: of its inputs and outputs.
        placements: of each parameter.
        source: the rank of the mesh whose values count; None: every rank cuts its own.
        attributes: what else ``kind`` needs.

    Raises:
        ValueError: the module was changed before.
    """
    if "forward" in vars(module):
        raise ValueError(
            f"{ends.style}: somebody replaced {type(module).__name__}.forward; apply the style first"
        )
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            raise ValueError(f"{ends.style}: {name} is cut already, {parameter.placements}; cut it once")
        cut = distribute_tensor(parameter, ends.mesh, [placements[name]], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
    module.__class__ = kind
    vars(module).update(attributes, ends=ends)

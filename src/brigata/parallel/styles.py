"""Styles for torch's ``parallelize_module``: its column, row and sequence styles with overlapped messages.

They serve models that are not ours. ``torch.distributed.tensor.parallel`` has names for what each rank holds;
here the same names mean the same, and messages travel while products run::

    parallelize_module(block, mesh, {"up": OverlappedColwise(), "down": OverlappedRowwise()})

Names of parameters, hooks and state dicts stay; parameters become DTensors, as under torch's own styles.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from brigata.describe.order import parse_order
from brigata.overlap.channel import Channel
from brigata.parallel.styled import FEATURES, ColumnLinear, Ends, PerToken, RowLinear, become
from brigata.schedule.build import build_program
from brigata.schedule.chunks import Chunks


def open_channel(mesh: DeviceMesh, order: str = "direct") -> Channel:
    """A channel over ``mesh``, to share between styles and the functions of ``brigata.overlap``.

    Args:
        mesh: with one axis.
        order: how products and messages follow each other: direct, ring, sliced:4, blocking, ...

    Raises:
        ValueError: the mesh has more axes, or the order does not exist or does not suit the mesh.
    """
    _refuse_more_axes(mesh)
    try:
        parsed = parse_order(order)
        for operator in ("all_gather_linear.forward", "linear_all_reduce.forward"):
            build_program(operator, parsed, Chunks.even(mesh.size(), mesh.size(), parsed.parts), 0)
    except ValueError as error:
        raise ValueError(f"order = {order} {error}") from None
    return Channel(mesh.get_group(), torch.device(mesh.device_type), parsed)


def _refuse_more_axes(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"the mesh has {mesh.ndim} axes; pass the one to cut over, such as mesh['tp']")


def _is_sequence(placement: Placement) -> bool:
    """Whether ``placement`` cuts a dim that may be a sequence."""
    return type(placement) is Shard and placement.dim != -1


class _LinearStyle(ParallelStyle):
    """What both styles of a linear share: a channel for each group, and how a module is changed."""

    def __init__(
        self,
        order: str,
        channel: Channel | None,
        input_layouts: Placement,
        output_layouts: Placement,
        use_local_output: bool,
    ) -> None:
        if channel is not None and order not in ("direct", str(channel.order)):
            raise ValueError(f"order = {order} but the channel's is {channel.order}; pass one of them")
        self.order = order
        self.shared = channel
        self.channels: dict[dist.ProcessGroup, Channel] = {}
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def channel(self, mesh: DeviceMesh) -> Channel:
        """The channel that was passed, or this style's own for ``mesh``'s group."""
        _refuse_more_axes(mesh)
        group = mesh.get_group()
        if self.shared is None:
            if group not in self.channels:
                self.channels[group] = open_channel(mesh, self.order)
            return self.channels[group]
        if self.shared.group != group:
            raise ValueError(f"the channel is of another group than {mesh}; use open_channel(mesh)")
        return self.shared

    def _change(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        kind: type[nn.Linear],
        weight: Placement,
        bias: Placement,
        **attributes: object,
    ) -> nn.Module:
        style, name = type(self).__name__, type(module).__name__
        if type(module) is not nn.Linear:
            raise ValueError(f"{style} takes an nn.Linear, not {name}; use a style of torch for {name}")
        channel = self.channel(mesh)
        ends = Ends(style, mesh, self.input_layouts, self.output_layouts, self.use_local_output)
        placements = {"weight": weight, "bias": bias}
        become(module, kind, ends, placements, self.src_data_rank, channel=channel, **attributes)
        return module


class OverlappedColwise(_LinearStyle):
    """``ColwiseParallel`` for ``nn.Linear``: weight and bias are cut by output features.

    With ``input_layouts=Shard(1)`` the sequence is gathered while products run, and in the backward the
    input's gradient is scattered likewise. With ``Replicate()`` only that gradient travels, to be summed for
    every rank, while the weight gradient is computed.

    Each linear gathers, or sums, for itself. Where several share an input (q, k and v; gate and up), a model
    that you can edit does better with one call for all of them on its tokens:
    ``brigata.overlap.linear.all_gather_linear(x, [wq, wk, wv], channel)``, or, where the input is whole,
    ``brigata.overlap.all_reduce.column_linear``, with ``channel = open_channel(mesh)``. Tied weights come
    untied, as under torch's styles.

    Args:
        order: how products and messages follow each other: direct, ring, sliced:4, blocking, ...
        channel: used instead of the style's own, to share its plans and its evidence; has its own order.
        input_layouts: ``Replicate()`` (default), or ``Shard(dim)`` of a sequence dim. Plain tensors are
            taken for equal shares; DTensors may be uneven.
        output_layouts: ``Shard(-1)`` (default), or ``Replicate()``: gathered afterwards, not overlapped.
        use_local_output: give out plain tensors.
        keep_gathered: keep the gathered input for the backward instead of gathering it again.

    Raises:
        ValueError: a layout or order that is not supported; the module is no ``nn.Linear``.
    """

    def __init__(
        self,
        *,
        order: str = "direct",
        channel: Channel | None = None,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        keep_gathered: bool = True,
    ) -> None:
        entry, leaving = input_layouts or Replicate(), output_layouts or FEATURES
        if not (entry.is_replicate() or _is_sequence(entry)):
            raise ValueError(f"OverlappedColwise: input_layouts = {entry}; use Replicate() or Shard(1)")
        if not (leaving.is_replicate() or leaving == FEATURES):
            raise ValueError(f"OverlappedColwise: output_layouts = {leaving}; use Shard(-1) or Replicate()")
        super().__init__(order, channel, entry, leaving, use_local_output)
        self.keep_gathered = keep_gathered

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        by_outputs = Shard(0)
        keep = self.keep_gathered
        return self._change(module, device_mesh, ColumnLinear, by_outputs, by_outputs, keep_gathered=keep)


class OverlappedRowwise(_LinearStyle):
    """``RowwiseParallel`` for ``nn.Linear``: the weight is cut by input features, the bias added to the sum.

    With ``output_layouts=Shard(1)`` each rank gets the sums of its own positions, with ``Replicate()`` those
    of all. Under ``Shard(1)`` the gradient of a bias is a ``Partial()`` DTensor, as torch leaves those of
    norms: whoever reads it (the optimizer, ``full_tensor``) sums it over ranks.

    Args:
        order: how products and messages follow each other: direct, ring, sliced:4, blocking, ...
        channel: used instead of the style's own, to share its plans and its evidence; has its own order.
        input_layouts: ``Shard(-1)``.
        output_layouts: ``Replicate()`` (default), or ``Shard(dim)`` of a sequence dim.
        use_local_output: give out plain tensors; the sequence must then divide over the ranks.

    Raises:
        ValueError: a layout or order that is not supported; the module is no ``nn.Linear``.
    """

    def __init__(
        self,
        *,
        order: str = "direct",
        channel: Channel | None = None,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        entry, leaving = input_layouts or FEATURES, output_layouts or Replicate()
        if entry != FEATURES:
            raise ValueError(f"OverlappedRowwise: input_layouts = {entry}; use Shard(-1)")
        if not (leaving.is_replicate() or _is_sequence(leaving)):
            raise ValueError(f"OverlappedRowwise: output_layouts = {leaving}; use Replicate() or Shard(1)")
        super().__init__(order, channel, entry, leaving, use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        by_inputs = Shard(1)
        return self._change(module, device_mesh, RowLinear, by_inputs, Replicate())


class OverlappedSequence(ParallelStyle):
    """``SequenceParallel``: a module that treats each token alone (a norm, dropout) sees this rank's tokens.

    It sends nothing, so it has no order. The module's own forward runs on plain tensors: a fused kernel
    serves. Gradients of its parameters are ``Partial()`` DTensors, as under torch's style: whoever reads them
    (the optimizer, ``full_tensor``) sums them over ranks.

    Args:
        sequence_dim: the dim of the sequence.
        use_local_output: give out plain tensors. By default DTensors, which tell the module that follows how
            long the whole sequence is; attention that reads this off its input needs it.

    Raises:
        ValueError: the dim is the last one; the module has submodules.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        if sequence_dim == -1:
            raise ValueError("OverlappedSequence: sequence_dim = -1 is the features; use 1")
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _refuse_more_axes(device_mesh)
        style, own = type(self).__name__, type(module)
        if any(True for _ in module.children()):
            raise ValueError(f"{style} takes one module without parts, not {own.__name__}; name its parts")
        kind = type(f"PerToken{own.__name__}", (PerToken, own), {})
        cut = Shard(self.sequence_dim)
        ends = Ends(style, device_mesh, cut, cut, self.use_local_output)
        whole = {name: Replicate() for name in module._parameters}
        become(module, kind, ends, whole, self.src_data_rank)
        return module

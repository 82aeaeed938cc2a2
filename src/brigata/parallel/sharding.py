"""How each kind of part is cut over the tp axis, declared as data, and the cutting itself."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from brigata.model.parts import Embedding, HeadLoss, Projection, Projections, RMSNorm

TENSOR_SHARDING: Mapping[type[nn.Module], Placement] = {
    Projections: Shard(0),  # column parallel: by output features
    Projection: Shard(1),  # row parallel: by input features
    Embedding: Shard(0),  # by vocabulary
    HeadLoss: Shard(0),  # by vocabulary
    RMSNorm: Replicate(),  # each rank norms its own tokens: gradients are summed over tp
}
"""Placement on the tp axis of all parameters of a part."""


def local_shard(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """This rank's share of ``whole`` under ``placements``, cut without communication.

    Axes are cut from the last to the first: tensor parallelism cuts first, ZeRO cuts what remains.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = whole
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        dim = getattr(placement, "dim")  # noqa: B009  (Shard and its strided variant have no common public type)
        shares = local.chunk(mesh.size(axis), dim)
        index = coordinate[axis]
        local = shares[index] if index < len(shares) else local.narrow(dim, 0, 0)
    return local


def shard_parameters(part: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace every parameter of ``part`` by a DTensor that holds this rank's share of it."""
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):  # tied to a part that was cut before
                continue
            local = local_shard(parameter.detach(), mesh, (placement,)).contiguous()
            cut = DTensor.from_local(
                local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def fill_parameter(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy ``whole`` into ``parameter``, or this rank's share of it into a DTensor's."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            share = local_shard(whole, parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(share)
        else:
            parameter.copy_(whole)

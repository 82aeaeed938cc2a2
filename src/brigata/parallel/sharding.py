"""How each kind of part is cut over the tp axis, declared as data, and the cutting itself."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from brigata.describe.model import ModelSpec
from brigata.model.experts import ExpertProducts, Router, SharedExpert
from brigata.model.mamba import GatedNorm, MambaMix
from brigata.model.parts import Embedding, HeadLoss, LayerNorm, LearnedPositions, Projection, RMSNorm

TENSOR_SHARDING: Mapping[type[nn.Module], Mapping[str, Placement]] = {
    nn.Linear: {"*": Shard(0)},  # in ``Projections``, column parallel: by output features
    Projection: {"weight": Shard(1), "bias": Replicate()},  # row parallel: by input features
    Embedding: {"*": Shard(0)},  # by vocabulary
    HeadLoss: {"*": Shard(0)},  # by vocabulary
    MambaMix: {"*": Shard(0)},  # by heads, or groups of heads
    GatedNorm: {"*": Shard(0)},  # by channels
    ExpertProducts: {"gate": Shard(1), "up": Shard(1), "down": Shard(2)},  # by the experts' inner width
    # what works on a rank's own tokens, or gets a share of every gradient: gradients are summed over tp
    Router: {"*": Replicate()},
    SharedExpert: {"*": Replicate()},
    RMSNorm: {"*": Replicate()},
    LayerNorm: {"*": Replicate()},
    LearnedPositions: {"*": Replicate()},
}
"""Placement on the tp axis of a part's own parameters, by name; ``*`` stands for all others."""


def shared_rows(spec: ModelSpec, name: str, rows: int, ranks: int, rank: int) -> slice | None:
    """The rows of a parameter that ``rank`` uses, where fewer groups than ranks share it; None: it is cut.

    Heads of attention read key/value heads, heads of Mamba-2 read groups of B and C. Where ranks are more
    than these, each group's rows serve ranks / groups neighbouring ranks: all hold the parameter whole, use
    their group's rows, and gradients are summed over tp.

    Args:
        spec: of the model.
        name: last name of the parameter's place: ``k`` and ``v`` (projections), ``B``, ``conv_B_bias``, ...
        rows: of the whole parameter.
        ranks: tp ranks.
        rank: this one.
    """
    if name in ("k", "v"):
        groups = spec.kv_heads
    elif spec.mamba is not None and name.removeprefix("conv_").removesuffix("_bias") in ("B", "C"):
        groups = spec.mamba.groups
    else:
        return None
    if groups % ranks == 0:
        return None
    width = rows // groups
    first = rank * groups // ranks * width
    return slice(first, first + width)


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


def shard_parameters(part: nn.Module, name: str, spec: ModelSpec, mesh: DeviceMesh) -> dict[str, slice]:
    """Replace every own parameter of ``part`` by a DTensor that holds this rank's share of it.

    Args:
        part: of a type in ``TENSOR_SHARDING``; children are left alone.
        name: last name of the part's place in the model.
        spec: of the model.
        mesh: the tp axis.

    Returns:
        For parameters that stay whole and are used in part: the rows that this rank uses.
    """
    placements = TENSOR_SHARDING[type(part)]
    used: dict[str, slice] = {}
    for own, parameter in list(part.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):  # tied to a part that was cut before
            continue
        placement = placements.get(own, placements.get("*", Replicate()))
        place = name if isinstance(part, nn.Linear) else own
        rows = shared_rows(spec, place, parameter.shape[0], mesh.size(), mesh.get_local_rank())
        if rows is not None:
            placement, used[own] = Replicate(), rows
        local = local_shard(parameter.detach(), mesh, (placement,)).contiguous()
        cut = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        part.register_parameter(own, nn.Parameter(cut, requires_grad=parameter.requires_grad))
    return used


@torch.no_grad()
def fill_tensor(tensor: Tensor, whole: Tensor) -> None:
    """Copy ``whole`` into a parameter or buffer, or this rank's share of it into a DTensor's."""
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(local_shard(whole, tensor.device_mesh, tensor.placements))
    else:
        tensor.copy_(whole)


@torch.no_grad()
def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a parameter or buffer, on every rank; every rank that holds a share takes part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()

"""What happens to gradients between the backward and the optimizer, right in every layout."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from brigata.overlap.channel import Channel
from brigata.overlap.evidence import Evidence


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _replicated_on(parameter: Tensor, axis: str) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return axis in names and parameter.placements[names.index(axis)].is_replicate()


def sum_replicated_gradients(parameters: Iterable[nn.Parameter], channel: Channel) -> None:
    """Sum over tp the gradients of parameters that every tp rank holds whole.

    Under sequence parallelism each rank saw only its own tokens. One message for all of them.
    """
    gradients = [_local(p.grad) for p in parameters if p.grad is not None and _replicated_on(p, "tp")]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    counted = channel.evidence.operators["replicated_gradients"]
    counted.calls += 1
    with channel.evidence.waiting("replicated_gradients", "tail", flat.device):
        dist.all_reduce(flat, group=channel.group)
    shares = flat.split([gradient.numel() for gradient in gradients])
    for gradient, share in zip(gradients, shares, strict=True):
        gradient.copy_(share.view_as(gradient))


def _replicas(parameter: Tensor) -> int:
    """How many ranks hold each element of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    copies = 1
    for axis, placement in enumerate(parameter.placements):
        copies *= mesh.size(axis) if placement.is_replicate() else 1
    return copies


def gradient_norm(parameters: Sequence[nn.Parameter], evidence: Evidence) -> Tensor:
    """The global 2-norm of all gradients, the same on every rank and (to rounding) in every layout.

    Each rank adds the squares of what it holds, divided by the number of ranks that hold the same; one
    scalar is summed over the world.
    """
    held = [p for p in parameters if p.grad is not None]
    norms = torch.stack(torch._foreach_norm([_local(p.grad) for p in held]))  # type: ignore[arg-type]
    copies = torch.tensor([_replicas(p) for p in held], dtype=norms.dtype, device=norms.device)
    total = (norms.square() / copies).sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        evidence.operators["gradient_norm"].calls += 1
        with evidence.waiting("gradient_norm", "tail", total.device):
            dist.all_reduce(total)
    return total.sqrt()


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float, evidence: Evidence) -> Tensor:
    """Scale all gradients so that their global norm is at most ``limit``; returns the norm before."""
    norm = gradient_norm(parameters, evidence)
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([_local(p.grad) for p in parameters if p.grad is not None], scale)
    return norm

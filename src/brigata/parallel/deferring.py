"""A model whose weight gradients can be deferred: its linear parts are told of a queue, from outside."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from brigata.model.parts import HeadLoss, Projection, Projections
from brigata.ops.loss import cross_entropy_sum
from brigata.overlap.channel import Channel
from brigata.overlap.deferred import WeightGradientQueue
from brigata.overlap.local_linear import local_linear
from brigata.parallel.mesh import REPLICATED_AXES
from brigata.parallel.owner_slices import OwnerSlicedProjections


class DeferringProjections(Projections):
    """``Projections`` whose weight gradients may be computed later."""

    weight_gradients: WeightGradientQueue

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project to each output."""
        outputs = local_linear(x, tuple(self.weights()), self.weight_gradients)
        pairs = zip(outputs, self.biases(), strict=True)
        return tuple(y if bias is None else y + bias.to(y.dtype) for y, bias in pairs)


class DeferringProjection(Projection):
    """``Projection`` whose weight gradient may be computed later."""

    weight_gradients: WeightGradientQueue

    def forward(self, x: Tensor) -> Tensor:
        """Project."""
        (y,) = local_linear(x, [self.weight], self.weight_gradients)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class DeferringHeadLoss(HeadLoss):
    """``HeadLoss`` whose weight gradient may be computed later."""

    weight_gradients: WeightGradientQueue

    def forward(self, h: Tensor, targets: Tensor | None = None) -> Tensor:
        """Loss where targets are given, else logits."""
        (logits,) = local_linear(h, [self.weight], self.weight_gradients)
        logits = self.finish(logits)
        return logits if targets is None else cross_entropy_sum(logits, targets)


_DEFERRING: dict[type[nn.Module], type[nn.Module]] = {
    Projections: DeferringProjections,
    Projection: DeferringProjection,
    HeadLoss: DeferringHeadLoss,
}


def defer_weight_gradients(model: nn.Module, queue: WeightGradientQueue) -> None:
    """Let each linear part of ``model`` that is called while ``queue`` is active leave its W to it.

    W is the weight gradient. Use this when ``model`` is parallel already. Parts on a channel defer by the
    channel, so all parts on one channel have one queue; parts of one process change their class and keep
    parameters, names and hooks. What is never deferred: the gradients of vectors, which cost next to nothing,
    an embedding's, whose backward is nothing else, and those of experts and of Mamba's convolution.

    Args:
        model: a whole network or a stage of one, real or on the meta device.
        queue: not active yet.

    Raises:
        ValueError: data parallelism of ``model`` cannot wait for gradients, or a part has another queue.
    """
    for refusal in _refusals(model):
        raise ValueError(refusal)
    for module in model.modules():
        channel = getattr(module, "channel", None)
        holder = channel if isinstance(channel, Channel) else module
        known = getattr(holder, "weight_gradients", None)
        if known is not None and known is not queue:
            raise ValueError(
                f"{type(module).__name__} leaves its weight gradients to another queue already; use that one"
            )
        if isinstance(channel, Channel):
            channel.weight_gradients = queue
        elif type(module) in _DEFERRING:
            module.__class__ = _DEFERRING[type(module)]
            vars(module)["weight_gradients"] = queue


def _refusals(model: nn.Module) -> Iterator[str]:
    """Ways of data parallelism that take gradients for complete when a backward has passed them."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        yield (
            "layout.zero_engine = 'fsdp2' sums a unit's gradients over ranks when its backward ends, before "
            "deferred weight gradients are there; use layout.zero_engine = 'brigata'"
        )
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if any(REPLICATED_AXES[0] in (mesh.mesh_dim_names or ()) for mesh in meshes):
        yield (
            "layout.dp_replicate > 1 sums a unit's gradients over replicas while the backward goes on, "
            "before deferred weight gradients are there; use layout.dp_replicate = 1"
        )
    if any(isinstance(module, OwnerSlicedProjections) for module in model.modules()):
        yield (
            "layout.slice_by_owner = true computes weight gradients of the first unit in its backward and "
            "defers none; use layout.slice_by_owner = false"
        )

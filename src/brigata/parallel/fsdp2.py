"""Data parallelism with ZeRO-2 or ZeRO-3 by PyTorch's ``fully_shard``: the reference for our engine."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from brigata.model.decoder import Decoder
from brigata.overlap.evidence import Evidence


class _TimedCollective:
    """A collective of ``fully_shard`` whose blocking time is counted as exposed.

    On the CPU ``fully_shard`` calls its collectives one after the other with the computation, so the whole
    call is exposed. On an accelerator they run on a stream of their own and the host's time says nothing:
    nothing is counted.
    """

    def __init__(self, operator: str, evidence: Evidence) -> None:
        self.operator = operator
        self.evidence = evidence

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for one call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        *args: Any,
        **options: Any,
    ) -> dist.Work | None:
        """Run the collective: ``args`` and ``options`` are passed on."""
        if output_tensor.device.type != "cpu":
            return self._run(output_tensor, input_tensor, group, *args, **options)
        counted = self.evidence.operators[self.operator]
        counted.calls += 1
        with self.evidence.waiting(self.operator, "middle", output_tensor.device):
            return self._run(output_tensor, input_tensor, group, *args, **options)

    def _run(
        self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, *args: Any, **options: Any
    ) -> dist.Work | None:
        if self.operator == "fully_shard.all_gather":
            return dist.all_gather_single(output, shard, group, *args, **options)
        return dist.reduce_scatter_single(output, shard, group=group, **options)


def apply_fsdp2(model: Decoder, mesh: DeviceMesh, zero: int, dtype: torch.dtype, evidence: Evidence) -> None:
    """Shard ``model`` unit by unit over ``mesh``, in place.

    Args:
        model: parameters in the master dtype; tensor parallelism, if any, already applied.
        mesh: the dp axis, or (replicas, shards): ``fully_shard`` then all-reduces over the replicas, which
            is not counted as exposed.
        zero: 2 keeps a unit's parameters from forward to backward, 3 gathers them again.
        dtype: of the products; gradients are reduced in the master dtype.
        evidence: where exposed communication is counted.
    """
    master = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == master else dtype, reduce_dtype=master)
    gather = _TimedCollective("fully_shard.all_gather", evidence)
    scatter = _TimedCollective("fully_shard.reduce_scatter", evidence)
    for module in [*model.units, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        # A loss is a sum over tokens, scaled for the whole batch: gradients are summed, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(gather)  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]

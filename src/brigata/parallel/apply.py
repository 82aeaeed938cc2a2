"""Builds a job's model under its layout: cut on the meta device, then filled share by share."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from brigata.describe.job import Job
from brigata.describe.layout import Layout
from brigata.describe.order import Order, parse_order
from brigata.model.checkpoint import open_checkpoint
from brigata.model.decoder import Decoder, build_decoder
from brigata.model.initial import initial_value
from brigata.overlap.auto import Chooser
from brigata.overlap.channel import Channel
from brigata.overlap.deferred import WeightGradientQueue
from brigata.overlap.evidence import Evidence
from brigata.overlap.speeds import measure_speeds
from brigata.parallel.balance import balance_experts
from brigata.parallel.data import DataEngine
from brigata.parallel.deferring import defer_weight_gradients
from brigata.parallel.fsdp2 import apply_fsdp2
from brigata.parallel.gradients import sum_replicated_gradients
from brigata.parallel.mesh import data_axes, split_replicas
from brigata.parallel.sharded_parameter import shard_over_data
from brigata.parallel.sharding import fill_tensor
from brigata.parallel.tensor import apply_tensor_parallel
from brigata.schedule.steps import Step

PRECISIONS = {
    "fp64": (torch.float64, torch.float64),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
}
"""Precision -> (dtype of parameters and optimizer, dtype of the products)."""


@dataclass
class ParallelModel:
    """A model under a layout.

    ``channel`` is the tp group's, None without tensor parallelism; ``engine`` runs data parallelism, None
    without it or under ``fully_shard``; ``evidence`` counts what all operators of this rank did;
    ``weight_gradients`` is the queue of deferred ones, None where none are deferred.
    """

    module: Decoder
    mesh: DeviceMesh | None
    channel: Channel | None
    engine: DataEngine | None = None
    evidence: Evidence = field(default_factory=Evidence)
    weight_gradients: WeightGradientQueue | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, tied ones once."""
        return list(self.module.parameters())

    def begin_micro_batch(self, last: bool) -> None:
        """Call ahead of each micro-batch's forward; ``last`` of the step."""
        if self.engine is not None:
            self.engine.begin_micro_batch(last)

    def defer_weight_gradients(self) -> WeightGradientQueue:
        """Let weight gradients be computed later than their backwards; the queue says which and when."""
        if self.weight_gradients is None:
            self.weight_gradients = WeightGradientQueue(self.evidence)
            defer_weight_gradients(self.module, self.weight_gradients)
        return self.weight_gradients

    def finish_gradients(self) -> None:
        """Call after a step's last backward: from here on every parameter has its summed gradient.

        Raises:
            RuntimeError: weight gradients were deferred and never computed.
        """
        if self.weight_gradients is not None:
            self.weight_gradients.end_step()
        if self.engine is not None:
            self.engine.finish()
        if self.channel is not None:
            sum_replicated_gradients(self.parameters, self.channel)

    def optimizer_stepped(self) -> None:
        """Call after the optimizer's step: experts are balanced, and gathering the new parameters begins."""
        balance_experts(self.module, self.mesh, self.evidence)
        if self.engine is not None:
            self.engine.prefetch()


def parallelize(
    model: Decoder,
    layout: Layout,
    mesh: DeviceMesh | None,
    before_step: Callable[[Step], None] | None = None,
    proven: bool = False,
) -> ParallelModel:
    """Apply ``layout`` to ``model``, whole or still on the meta device, in place.

    Args:
        model: every rank passes the same one.
        layout: degrees and methods.
        mesh: with the axes dp and tp; None for a single process.
        before_step: called ahead of every schedule step (tests inject delays).
        proven: check every schedule before it first runs.
    """
    parallel = ParallelModel(model, mesh, None)
    if mesh is None:
        return parallel
    device = torch.device(mesh.device_type)
    if mesh["tp"].size() > 1:
        group = mesh["tp"].get_group()
        order: Order | Chooser
        if layout.overlap == "auto":
            order = Chooser(measure_speeds(group, device, model.dtype))
        else:
            order = parse_order(layout.overlap)
        parallel.channel = Channel(group, device, order, parallel.evidence, before_step, proven)
        apply_tensor_parallel(model, mesh["tp"], parallel.channel, layout.keep_gathered)
    if mesh["dp"].size() > 1:
        data = split_replicas(mesh, layout.dp_replicate)
        if layout.zero_engine == "fsdp2":
            apply_fsdp2(model, data[data_axes(data)], layout.zero, model.dtype, parallel.evidence)
        else:
            shard_over_data(model, data)
            *replicas, channel = (
                Channel(data[axis].get_group(), device, Order("direct"), parallel.evidence)
                for axis in data_axes(data)
            )
            parallel.engine = DataEngine(
                model, channel, replicas[0] if replicas else None, layout.zero, layout.slice_by_owner
            )
    return parallel


def build_model(
    job: Job,
    mesh: DeviceMesh | None,
    before_step: Callable[[Step], None] | None = None,
    proven: bool = False,
) -> ParallelModel:
    """The job's model with its initial values, or the weights of the checkpoint in ``model.path``.

    Memory holds a rank's share and one whole tensor at a time.

    Raises:
        JobError: the checkpoint is not one, or not of this model.
    """
    master, dtype = PRECISIONS[job.train.precision]
    model = build_decoder(job.model, dtype).to(master)
    parallel = parallelize(model, job.layout, mesh, before_step, proven)
    device = "cpu" if mesh is None else mesh.device_type
    model.to_empty(device=device)
    if job.model.tie_embeddings:
        model.head_loss.weight = model.embed.weight
    with ExitStack() as stack:
        folder = job.model.path
        tensors = None if folder is None else stack.enter_context(open_checkpoint(Path(folder)))
        kept = {} if tensors is None else tensors.shapes()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensors is not None and name in kept:
                whole = tensors.load(name)
            else:
                whole = initial_value(name, tensor.shape, job.model, job.train.seed, master)
            fill_tensor(tensor, whole)
    return parallel

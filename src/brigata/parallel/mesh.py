"""The one place that builds the device mesh."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from brigata.describe.errors import JobError
from brigata.describe.job import Job

AXES = ("dp", "tp")
"""Axes of the mesh, outermost first: ranks of one tp group are neighbours."""
REPLICATED_AXES = ("dp_replicate", "dp_shard")
"""What the dp axis is made of where there are replicas: ranks of one shard group are neighbours."""


def device_type() -> str:
    """The kind of device that ranks of this process's world compute on."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def build_mesh(job: Job) -> DeviceMesh:
    """The mesh of ``job``'s layout over the whole world.

    Raises:
        JobError: the world has another number of ranks than the layout needs.
    """
    world = dist.get_world_size()
    if world != job.ranks:
        raise JobError(
            f"the layout needs {job.ranks} ranks (layout.tp = {job.layout.tp}, layout.dp = {job.dp}) "
            f"but the world has {world}; start {job.ranks} ranks"
        )
    return init_device_mesh(device_type(), (job.dp, job.layout.tp), mesh_dim_names=AXES)


def split_replicas(mesh: DeviceMesh, replicas: int) -> DeviceMesh:
    """The same ranks with the dp axis split into ``REPLICATED_AXES``; ``mesh`` itself for one replica.

    The axes of ``mesh`` stay as they are: whoever needs all of dp goes on using ``mesh["dp"]``.
    """
    if replicas == 1:
        return mesh
    return mesh._unflatten("dp", (replicas, mesh["dp"].size() // replicas), REPLICATED_AXES)


def data_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Names of the data-parallel axes of ``mesh``; ZeRO cuts over the last, any before it is of replicas."""
    names = mesh.mesh_dim_names or ()
    return REPLICATED_AXES if REPLICATED_AXES[0] in names else AXES[:1]

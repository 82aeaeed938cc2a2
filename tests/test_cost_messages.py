"""Predicted messages are those that the operators count."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from brigata.cost.messages import sent_bytes, tensor_backward, tensor_forward
from brigata.cost.units import Share
from brigata.describe import Job
from brigata.parallel.apply import build_model
from brigata.parallel.mesh import build_mesh
from pool import Pool
from test_families import FAMILIES, family_job


def bytes_sent(job: Job) -> list[float]:
    """Bytes that this rank's units send in a forward and in a backward, as the operators count them."""
    model = build_model(job, build_mesh(job))
    tokens = torch.arange(24).view(2, 12)
    sequences = model.module.sequences(tokens, None, None)
    rows = tokens.numel() // dist.get_world_size()
    h = torch.randn(rows, job.model.hidden, dtype=torch.float64, requires_grad=True)
    y = h
    model.evidence.take()
    for unit in model.module.units:
        y = unit(y, sequences)
    forward = sum(counted.bytes_sent for counted in model.evidence.take().values())
    y.sum().backward()
    backward = sum(counted.bytes_sent for counted in model.evidence.take().values())
    return [forward, backward]


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "gathered again"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_traffic_is_what_operators_count(pool: Pool, family: str, keep: bool) -> None:
    layout: dict[str, Any] = {"tp": 2, "keep_gathered": keep}
    job = family_job(family, layout)
    share = Share(sequences=2, length=12, keys=12, tp=2, itemsize=8)
    units = job.model.pattern
    forward = sum(sent_bytes(tensor_forward(job.model, letter, share)) for letter in units)
    backward = sum(sent_bytes(tensor_backward(job.model, letter, share, keep)) for letter in units)
    for counted in pool.run(2, bytes_sent, job):
        assert counted == pytest.approx([forward, backward])

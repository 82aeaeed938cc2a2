"""What a layout computes, gathered to whole tensors, so that layouts can be compared."""

import random
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from brigata.describe import Job, parse_job
from brigata.parallel.apply import build_model
from brigata.parallel.gradients import clip_gradients
from brigata.parallel.mesh import build_mesh


def job(layout: dict[str, Any], **changes: Any) -> Job:
    data: dict[str, Any] = {
        "version": 1,
        "model": {"hidden": 32, "pattern": "*-*-", "heads": 8, "kv_heads": 4, "ffn": 48},
        "workload": {"seq_len": 12, "global_batch": 8, "micro_batch": 2},
        "layout": layout,
        "train": {"steps": 3, "precision": "fp64", "clip": 0.05, "lr": 0.01},
    }
    for setting, value in changes.items():
        section, key = setting.split("__")
        data[section] = {**data[section], key: value}
    return parse_job(data)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_steps(job: Job, delays: bool = False, steps: int = 3) -> dict[str, Any]:
    """Losses, first gradients and norm, and parameters after ``steps`` optimizer steps."""
    from brigata.train.optimizer import build_optimizer

    generator = random.Random(dist.get_rank())
    pause = (lambda _: time.sleep(generator.random() * 0.002)) if delays else None
    model = build_model(job, build_mesh(job), before_step=pause, proven=True)
    optimizer = build_optimizer(job, model.parameters)
    mesh = model.mesh
    assert mesh is not None
    dp = mesh["dp"].get_local_rank()
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        tokens = np.random.default_rng(step).integers(
            0, 256, (job.workload.global_batch, job.workload.seq_len + 1)
        )
        share = tokens[dp * len(tokens) // job.dp : (dp + 1) * len(tokens) // job.dp]
        loss = torch.zeros((), dtype=torch.float64)
        for i in range(0, len(share), job.micro_batch):
            model.begin_micro_batch(last=i + job.micro_batch >= len(share))
            micro = torch.from_numpy(share[i : i + job.micro_batch])
            part = model.module(micro[:, :-1], micro[:, 1:]) / job.tokens_per_step
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        model.finish_gradients()
        if step == 0:
            result["gradients"] = {n: _whole(p.grad) for n, p in model.module.named_parameters()}
        result["norms"].append(clip_gradients(model.parameters, job.train.clip, model.evidence))
        result["losses"].append(loss)
        optimizer.step()
        optimizer.zero_grad()
        model.optimizer_stepped()
    result["parameters"] = {n: _whole(p) for n, p in model.module.named_parameters()}
    result["buffers"] = {n: b.clone() for n, b in model.module.named_buffers()}
    result["evidence"] = model.evidence.take()
    return result

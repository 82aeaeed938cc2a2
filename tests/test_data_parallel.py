"""Data parallelism: replicas, products sliced by owner, and what travels in a step, counted."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate

from brigata.describe import Job
from brigata.parallel.apply import ParallelModel, build_model
from brigata.parallel.gradients import clip_gradients
from brigata.parallel.mesh import build_mesh
from equivalence import job, train_steps
from pool import Pool

UNEVEN = {
    "model": {"hidden": 12, "pattern": "*-*", "heads": 6, "kv_heads": 1, "ffn": 10},
    "workload": {"seq_len": 12, "global_batch": 6, "micro_batch": 1},
}
"""Over three ranks: 12 query rows, 2 key rows (nobody's for the last rank), 10 inner rows as 4, 4 and 2."""


def uneven(layout: dict[str, Any]) -> Job:
    changes = {f"{section}__{key}": value for section in UNEVEN for key, value in UNEVEN[section].items()}
    return job(layout, **changes)


def backward(job: Job, model: ParallelModel, step: int, say: bool = True) -> None:
    """All micro-batches of one step."""
    assert model.mesh is not None
    tokens = np.random.default_rng(step).integers(
        0, 256, (job.workload.global_batch, job.workload.seq_len + 1)
    )
    share = np.array_split(tokens, job.dp)[model.mesh["dp"].get_local_rank()]
    for i in range(0, len(share), job.micro_batch):
        if say:
            model.begin_micro_batch(last=i + job.micro_batch >= len(share))
        micro = torch.from_numpy(share[i : i + job.micro_batch])
        (model.module(micro[:, :-1], micro[:, 1:]) / job.tokens_per_step).backward()


def assert_close(mine: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    torch.testing.assert_close(mine["losses"], other["losses"], rtol=tolerance, atol=0)
    torch.testing.assert_close(mine["norms"], other["norms"], rtol=tolerance, atol=0)
    for kind in ("gradients", "parameters"):
        for name, value in other[kind].items():
            error = (mine[kind][name] - value).norm() / value.norm()
            assert error < tolerance, f"{kind} of {name}: relative error {error:.1e}"


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_slicing_by_owner_changes_nothing_with_uneven_and_empty_rows(pool: Pool, zero: int) -> None:
    sliced, whole = (
        pool.run(3, train_steps, uneven({"dp": 3, "zero": zero, "slice_by_owner": choice}))
        for choice in (True, False)
    )
    reference = pool.run(1, train_steps, uneven({}))[0]
    for mine, other in zip(sliced, whole, strict=True):
        assert_close(mine, other, 1e-12)
        assert_close(mine, reference, 1e-10)
    steps, micro_batches = 3, 2
    forwards = steps * micro_batches if zero == 3 else steps
    backwards = steps if zero == 1 else steps * micro_batches
    for result in sliced:
        gather, scatter = (result["evidence"][f"data_parallel.{way}"] for way in ("gather", "scatter"))
        assert (gather.products, gather.overlapped_calls) == (3 * forwards, forwards)
        assert scatter.products == 3 * backwards


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 4, "dp_replicate": 2, "zero": 2},
        {"dp": 4, "dp_replicate": 2, "zero": 3},
        {"dp": 3, "dp_replicate": 3, "zero": 2},
        {"dp": 2, "dp_replicate": 2, "zero": 1, "tp": 2},
    ],
    ids=["2x2-zero2", "2x2-zero3", "3x1-zero2", "2x1-tp2-zero1"],
)
def test_replicas_and_repeated_runs_are_bitwise_equal(pool: Pool, layout: dict[str, Any]) -> None:
    batch = {"workload__global_batch": 12, "workload__micro_batch": 1}
    request = job(layout, **batch)
    reference = pool.run(1, train_steps, job({}, **batch))[0]
    first, second = (pool.run(request.ranks, train_steps, request) for _ in range(2))
    for result in [*first, *second]:
        assert_close(result, reference, 1e-10)
        for kind in ("gradients", "parameters"):
            for name, value in first[0][kind].items():
                assert torch.equal(result[kind][name], value), f"{kind} of {name}"


def count_a_step(job: Job) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Evidence of a first step's backward, and of each parameter its (whole, own) elements."""
    model = build_model(job, build_mesh(job))
    shards = {name: p.to_local().numel() for name, p in model.module.named_parameters()}
    sizes = {name: (p.numel(), shards[name]) for name, p in model.module.named_parameters()}
    assert (
        all(isinstance(p.placements[0], Replicate) for p in model.parameters) or job.layout.dp_replicate == 1
    )
    backward(job, model, 0)
    model.finish_gradients()
    return model.evidence.take(), sizes


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("dp", "replicas"), [(2, 1), (4, 2), (4, 4), (3, 3)])
def test_messages_and_bytes_of_a_step_follow_the_formula(
    pool: Pool, zero: int, dp: int, replicas: int
) -> None:
    request = job(
        {"dp": dp, "dp_replicate": replicas, "zero": zero}, workload__global_batch=24, workload__micro_batch=1
    )
    n, micro_batches, itemsize = dp // replicas, 24 // dp, 8
    for rank, (evidence, sizes) in enumerate(pool.run(dp, count_a_step, request)):
        units = {name: size for name, size in sizes.items() if name.startswith("units.")}
        whole, own = (sum(size[i] for size in sizes.values()) for i in range(2))
        again = sum(size[1] for size in units.values())
        gathered, parameters = own, len(sizes)
        if zero == 3:  # every micro-batch: all for its forward, the units again for its backward
            gathered, parameters = (own + again) * micro_batches, (len(sizes) + len(units)) * micro_batches
        assert evidence["data_parallel.gather"].messages == parameters * (n - 1)
        assert evidence["data_parallel.gather"].bytes_sent == gathered * (n - 1) * itemsize
        times = 1 if zero == 1 else micro_batches
        assert evidence["data_parallel.scatter"].messages == len(sizes) * (n - 1) * times
        assert evidence["data_parallel.scatter"].bytes_sent == (whole - own) * times * itemsize
        if replicas == 1:
            assert "data_parallel.replicate" not in evidence
            continue
        groups = _own_elements_by_group(sizes, sliced=n > 1)
        replicated = evidence["data_parallel.replicate"]
        assert replicated.calls == len(groups)
        if replicas == 2:
            assert (replicated.messages, replicated.bytes_sent) == (len(groups), own * itemsize)
            continue
        slices = [len(torch.empty(e).tensor_split(replicas)[rank // n]) for e in groups]
        sent = sum(e - slice + (replicas - 1) * slice for e, slice in zip(groups, slices, strict=True))
        assert replicated.messages == 2 * (replicas - 1) * len(groups)
        assert replicated.bytes_sent == sent * itemsize


def _own_elements_by_group(sizes: dict[str, tuple[int, int]], sliced: bool) -> list[int]:
    groups: dict[str, int] = {}
    for name, (_, own) in sizes.items():
        group = ".".join(name.split(".")[:2]) if name.startswith("units.") else name.split(".")[0]
        group = "head" if group in ("norm", "head_loss") else group
        if sliced and group == "units.0":
            group = ".".join(name.split(".")[:4])
            group = "project_in" if "project_in" in name else group
        groups[group] = groups.get(group, 0) + own
    return list(groups.values())


def train_a_frozen_first_unit(job: Job) -> dict[str, torch.Tensor]:
    model = build_model(job, build_mesh(job))
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_(name not in ("embed.weight", "units.0.block.project_in.k.weight"))
    backward(job, model, 0)
    model.finish_gradients()
    clip_gradients(model.parameters, 1e-3, model.evidence)
    return {
        name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for name, p in model.module.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 2}, {"dp": 4, "dp_replicate": 2, "zero": 3}])
def test_frozen_parameters_get_no_gradient(pool: Pool, layout: dict[str, Any]) -> None:
    reference = pool.run(1, train_a_frozen_first_unit, job({}))[0]
    for result in pool.run(layout["dp"], train_a_frozen_first_unit, job(layout)):
        assert result.keys() == reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(result[name], value, rtol=1e-10, atol=1e-16)


def forget_to_announce_micro_batches(job: Job) -> str:
    model = build_model(job, build_mesh(job))
    try:
        backward(job, model, 0, say=False)
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


def test_gradients_after_the_sum_over_replicas_are_an_error(pool: Pool) -> None:
    request = job({"dp": 2, "dp_replicate": 2}, model__pattern="*-*-*-")
    for said in pool.run(2, forget_to_announce_micro_batches, request):
        assert "call begin_micro_batch(last=False) ahead of every micro-batch but a step's last one" in said

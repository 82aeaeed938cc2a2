"""What a job asks for that cannot be done: checks across sections, before any process starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from brigata.describe.errors import divisors, one_of
from brigata.describe.order import parse_order
from brigata.describe.pattern import planning_only
from brigata.describe.tensor_degrees import tensor_degrees, undivided

if TYPE_CHECKING:
    from brigata.describe.job import Job


MOST_RANKS = 64
"""Tensor-parallel degrees are proposed up to this one."""


def find_refusals(job: Job, run: bool = True) -> list[str]:
    """All reasons why ``job`` cannot run, or (``run`` false) cannot be planned, one sentence each."""
    if not run:
        batch = () if job.serve is not None else _batch(job)
        return [*_layout(job), *_planned(job), *_ranks(job), *batch]
    return [*_not_there_yet(job), *_layout(job), *_model(job), *_ranks(job), *_batch(job), *_train(job)]


RUNNING = {
    "sequence_parallel": True,
    "expert_tp": None,
    "schedule": None,
    "virtual_stages": 1,
    "recompute": "none",
    "offload": "none",
}
"""Settings of a layout that only this value of runs yet."""


def _not_there_yet(job: Job) -> Iterator[str]:
    for name, what in (("cp", "context"), ("pp", "pipeline"), ("ep", "expert")):
        degree = getattr(job.layout, name)
        if degree != 1:
            yield f"layout.{name} = {degree}: {what} parallelism does not run yet; use 1"
    for name, value in RUNNING.items():
        asked = getattr(job.layout, name)
        if asked != value:
            way = "leave it out" if value is None else f"use {json.dumps(value)}"
            yield f"layout.{name} = {json.dumps(asked)} does not run yet, it is planned only; {way}"
    if job.layout.zero == 0:
        yield "layout.zero = 0 is planned only; use layout.zero = 1"
    if job.cluster.preset != "local":
        yield f"cluster.preset = {job.cluster.preset!r} is described, not here; use cluster.preset = 'local'"
    if job.train.precision in ("fp16", "fp8", "fp4"):
        yield f"train.precision = {job.train.precision!r} is planned only; use bf16"
    if job.serve is not None:
        yield "[serve] is planned only; remove it, or use `brigata simulate`"
    if job.train.trained != "all":
        yield f"train.trained = {job.train.trained!r} is planned only; use 'all'"


def _planned(job: Job) -> Iterator[str]:
    """What no device could do."""
    model, layout = job.model, job.layout
    if model.has_attention and model.heads % layout.tp:
        yield (
            f"layout.tp = {layout.tp} does not divide model.heads = {model.heads}; "
            f"use {one_of(divisors(model.heads))}"
        )
    if layout.recompute_layers is not None and layout.recompute != "full":
        yield (
            f"layout.recompute_layers = {layout.recompute_layers} goes with layout.recompute = 'full', not "
            f"{layout.recompute!r}; use layout.recompute = 'full'"
        )
    if job.workload.seq_len % layout.cp:
        more = -(-job.workload.seq_len // layout.cp) * layout.cp
        yield (
            f"layout.cp = {layout.cp} does not divide workload.seq_len = {job.workload.seq_len}; "
            f"use {more} tokens"
        )
    if job.serve is not None and layout.cp > 1:
        yield f"layout.cp = {layout.cp} is not modelled in serving; use layout.cp = 1"
    stages = layout.pp * layout.virtual_stages
    units = len(model.pattern)
    if stages > units:
        yield (
            f"layout.pp * layout.virtual_stages = {stages} is more than the {units} units of model.pattern; "
            f"use {units} or less"
        )
    schedule = job.schedule
    if layout.virtual_stages > 1 and schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        yield (
            f"layout.schedule = {schedule!r} has one stage a rank, not layout.virtual_stages = "
            f"{layout.virtual_stages}; use layout.schedule = 'interleaved' or layout.virtual_stages = 1"
        )
    if layout.pp > 1 and schedule == "dualpipe-v" and job.accumulation < 2 * layout.pp:
        yield (
            f"layout.schedule = 'dualpipe-v' needs {2 * layout.pp} micro-batches for layout.pp = "
            f"{layout.pp}, not {job.accumulation}; use a smaller workload.micro_batch or '1f1b'"
        )
    if model.experts is not None:
        if model.experts.count % layout.ep:
            yield (
                f"layout.ep = {layout.ep} does not divide model.experts.count = {model.experts.count}; "
                f"use {one_of(divisors(model.experts.count))}"
            )
        spread = layout.tp * layout.cp * job.dp
        if spread % (layout.ep * (layout.expert_tp or 1)):
            yield (
                f"layout.ep = {layout.ep} with layout.expert_tp = {layout.expert_tp or 1} does not divide "
                f"tp * cp * dp = {spread}; use layout.ep = {one_of(divisors(spread))}"
            )
    elif layout.ep > 1:
        yield f"layout.ep = {layout.ep}, and model.pattern has no experts; use layout.ep = 1"


def _layout(job: Job) -> Iterator[str]:
    if job.layout.zero == 1 and job.layout.zero_engine == "fsdp2":
        yield "layout.zero = 1 is not for layout.zero_engine = 'fsdp2'; use layout.zero = 2"
    if job.dp % job.layout.dp_replicate:
        yield (
            f"layout.dp_replicate = {job.layout.dp_replicate} does not divide layout.dp = {job.dp}; "
            f"use {one_of(divisors(job.dp))}"
        )
    if job.layout.overlap != "auto":
        node, tp = parse_order(job.layout.overlap).node, job.layout.tp
        if node and tp % node:
            overlap = job.layout.overlap
            yield f"layout.overlap = {overlap!r}: {node} ranks a node do not divide tp = {tp}; use direct"


def _model(job: Job) -> Iterator[str]:
    model = job.model
    refusal = planning_only(model.pattern)
    if refusal is not None:
        yield refusal
        return
    if model.has_attention and model.heads % model.kv_heads:
        yield (
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}; "
            f"use {one_of(divisors(model.heads))}"
        )
        return
    yield from _tensor_parallel(job)
    if model.vocab < 256:
        yield f"model.vocab = {model.vocab} cannot hold the 256 tokens of the byte tokenizer; use 256 or more"
    longest = model.max_positions if model.positions == "learned" else None
    if longest is not None and job.workload.seq_len > longest:
        yield (
            f"workload.seq_len = {job.workload.seq_len} is more than model.max_positions = {longest}, the "
            f"learned ones; use {longest} or less"
        )


def _tensor_parallel(job: Job) -> Iterator[str]:
    tp, good = job.layout.tp, tensor_degrees(job.model, MOST_RANKS)
    if tp not in good:
        for setting, size in undivided(job.model, tp):
            yield f"layout.tp = {tp} does not divide {setting} = {size}; use {one_of(good)}"
    if job.model.vocab % tp and job.dp > 1:
        more = -(-job.model.vocab // tp) * tp
        yield (
            f"layout.tp = {tp} does not divide model.vocab = {job.model.vocab}, and that runs with "
            f"layout.dp = 1 only; use model.vocab = {more} or layout.dp = 1"
        )


def _ranks(job: Job) -> Iterator[str]:
    devices = job.cluster.devices
    if devices is None or devices == job.ranks:
        return
    without_dp = job.ranks // job.dp
    if devices % without_dp:
        yield (
            f"cluster.devices = {devices} is no multiple of tp * cp * pp = {without_dp}; "
            f"use {one_of((without_dp, 2 * without_dp, 4 * without_dp))}"
        )
    else:
        yield (
            f"cluster.devices = {devices} but the layout needs {job.ranks} ranks "
            f"(tp * cp * pp * dp); use layout.dp = {devices // without_dp} or cluster.devices = {job.ranks}"
        )


def _batch(job: Job) -> Iterator[str]:
    batch, dp = job.workload.global_batch, job.dp
    if batch % dp:
        nearest = batch // dp * dp or dp
        yield f"workload.global_batch = {batch} is no multiple of layout.dp = {dp}; use {nearest}"
        return
    share = batch // dp
    if share % job.micro_batch:
        yield (
            f"workload.micro_batch = {job.micro_batch} does not divide the {share} sequences of a "
            f"data-parallel rank (global_batch / dp); use {one_of(divisors(share))}"
        )
    seq_len, tp = job.workload.seq_len, job.layout.tp
    if seq_len % tp:
        more = -(-seq_len // tp) * tp
        yield f"layout.tp = {tp} does not divide workload.seq_len = {seq_len}; use {more} tokens"


def _train(job: Job) -> Iterator[str]:
    data = job.train.data
    for name in [data] if isinstance(data, str) else data or []:
        path = Path(name)
        if not path.exists():
            yield f"train.data = {name!r} is not there; name an existing folder or text file"
        elif path.is_dir() and not any(file.is_file() for file in path.rglob("*")):
            yield f"train.data = {name!r} holds no file; name a folder with text files"
        elif path.is_file() and path.stat().st_size == 0:
            yield f"train.data = {name!r} is empty; name a text file with some text"
    if data == []:
        yield "train.data = [] names no file; leave it out for the standard library's sources"
    yield from _trace(job)
    steps = job.train.steps
    if job.warmup > steps:
        yield f"train.warmup = {job.warmup} is more than train.steps = {steps}; use {steps // 10}"


def _trace(job: Job) -> Iterator[str]:
    traced, steps = job.train.trace_steps, job.train.steps
    if traced is None:
        return
    if len(traced) != 2 or not 0 <= traced[0] <= traced[1] < steps:
        yield (
            f"train.trace_steps = {traced} is no range of steps from 0 to {steps - 1}; "
            f"use [{min(5, steps - 1)}, {min(7, steps - 1)}]"
        )

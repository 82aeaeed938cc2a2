"""The training loop of one rank."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from brigata.describe.job import Job
from brigata.describe.order import Order
from brigata.describe.parameters import count_parameters
from brigata.model.generate import generate
from brigata.overlap.evidence import OperatorEvidence
from brigata.parallel.apply import ParallelModel, build_model
from brigata.parallel.gradients import clip_gradients
from brigata.parallel.mesh import build_mesh
from brigata.train.batches import Batches, held_out_windows
from brigata.train.corpus import Corpus, load_corpus
from brigata.train.metrics import DATA_PARALLEL, PHASES, MetricsFile, Phases, peak_memory_bytes
from brigata.train.optimizer import build_optimizer, learning_rate
from brigata.train.progress import TrainingProgress
from brigata.train.report import write_report
from brigata.train.saving import save_weights
from brigata.train.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, tokenize
from brigata.train.tracing import begin_trace, end_trace
from brigata.train.trigram import trigram_loss


@dataclass
class _Run:
    """Everything one rank holds while it trains."""

    job: Job
    model: ParallelModel
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    batches: Batches
    phases: Phases
    device: torch.device
    dp_rank: int
    overlapped_calls: int = 0
    records: list[dict[str, float | int]] = field(default_factory=list)


def train(job: Job, out: Path, device: torch.device) -> None:
    """Train ``job``'s model in the process group that is already there; rank 0 writes into ``out``.

    Leaves ``job.json``, ``metrics.jsonl``, ``summary.json``, ``report.html`` and the trained weights in
    ``checkpoint``.

    Raises:
        JobError: the world does not fit the layout, or the data is too short.
        RuntimeError: overlap was asked for and no operator ran overlapped.
    """
    mesh = build_mesh(job)
    main = dist.get_rank() == 0
    tokenizer = load_tokenizer(job)
    corpus = tokenize(load_corpus(job.train.data, job.workload.seq_len), tokenizer, job.workload.seq_len)
    model = build_model(job, mesh)
    batches = Batches(corpus.train, job.workload.seq_len, job.workload.global_batch, job.train.seed)
    optimizer = build_optimizer(job, model.parameters)
    phases = Phases(device, model.evidence)
    run = _Run(job, model, tokenizer, optimizer, batches, phases, device, mesh["dp"].get_local_rank())
    metrics = MetricsFile(out / "metrics.jsonl") if main else None
    if main:
        (out / "job.json").write_text(job.model_dump_json(indent=1) + "\n", encoding="utf-8")
    console = Console()
    with TrainingProgress(console, job.name, job.train.steps, shown=main) as progress:
        first_traced, last_traced = job.train.trace_steps or (-1, -1)
        for step in range(job.train.steps):
            if step == first_traced:
                begin_trace(model)
            record = _step(run, step)
            if step == last_traced:
                end_trace(model, out / "trace.json", job.name, device)
            run.records.append(record)
            if metrics is not None:
                metrics.write(record)
            exposed_share = record["exposed_comm_s"] / record["step_time_s"]
            progress.update(step, record["loss"], record["tokens_per_s"], exposed_share)
    if metrics is not None:
        metrics.close()
    if job.train.save_weights:
        save_weights(model, job, out / "checkpoint", writes=main)
    summary = _summarise(run, corpus)
    if main:
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        report = write_report(out)
        _print_summary(console, summary, report)


def _step(run: _Run, step: int) -> dict[str, float | int]:
    """One optimizer step; returns what ``metrics.jsonl`` says of it, the same on every rank."""
    job, model, phases = run.job, run.model, run.phases
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    share = job.workload.global_batch // job.dp
    for first in range(0, share, job.micro_batch):
        with phases.phase("data"):
            start = run.dp_rank * share + first
            windows = torch.from_numpy(run.batches.sequences(step, start, job.micro_batch)).to(run.device)
        with phases.phase("compute"):
            model.begin_micro_batch(last=first + job.micro_batch >= share)
            part = model.module(windows[:, :-1], windows[:, 1:]) / job.tokens_per_step
            part.backward()
            loss += part.detach()
    with phases.phase("compute"):
        model.finish_gradients()
        norm = clip_gradients(model.parameters, job.train.clip, model.evidence)
    with phases.phase("optimizer"):
        lr = learning_rate(job, step)
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        run.optimizer.step()
        run.optimizer.zero_grad()
        model.optimizer_stepped()
    evidence = model.evidence.take()
    run.overlapped_calls += _overlapped_calls(run, evidence)
    exposed = _exposed(evidence)
    seconds = phases.end_step(exposed)
    loss_value, exposed_s, step_s, memory = _over_ranks(run, loss, sum(exposed.values()), seconds)
    return {
        "step": step,
        "loss": loss_value,
        "grad_norm": float(norm),
        "lr": lr,
        "tokens": job.tokens_per_step,
        "step_time_s": step_s,
        "tokens_per_s": job.tokens_per_step / step_s,
        "exposed_comm_s": exposed_s,
        "peak_memory_bytes": memory,
    }


def _overlapped_calls(run: _Run, evidence: dict[str, OperatorEvidence]) -> int:
    """Calls that ran overlapped; none at all, when the job asked for overlap, is an error."""
    calls = sum(counted.overlapped_calls for counted in evidence.values())
    overlap = run.job.layout.overlap
    channel = run.model.channel
    asked = channel is not None and isinstance(channel.order, Order) and channel.order.overlapped
    if asked and not calls:
        raise RuntimeError(f"layout.overlap = {overlap!r} was asked for, but no operator ran overlapped")
    return calls


def _exposed(evidence: dict[str, OperatorEvidence]) -> dict[str, float]:
    """Seconds in which this rank waited for the network, by the kind of parallelism that waited."""
    exposed = {"exposed tensor-parallel": 0.0, "exposed data-parallel": 0.0}
    for operator, counted in evidence.items():
        kind = "data" if operator.startswith(DATA_PARALLEL) else "tensor"
        exposed[f"exposed {kind}-parallel"] += counted.exposed_s
    return exposed


def _over_ranks(run: _Run, loss: Tensor, exposed_s: float, seconds: float) -> tuple[float, float, float, int]:
    """Loss over all data, mean exposed time and step time over ranks, the largest rank's memory."""
    world, tp = dist.get_world_size(), run.job.layout.tp
    memory = [0.0] * world
    memory[dist.get_rank()] = float(peak_memory_bytes(run.device))
    values = torch.tensor(
        [float(loss) / tp, exposed_s / world, seconds / world, *memory], dtype=torch.float64
    )
    values = values.to(run.device)
    dist.all_reduce(values)
    total, exposed, step, *memory = values.tolist()
    return total, exposed, step, int(max(memory))


def _held_out_loss(run: _Run, corpus: Corpus) -> tuple[float, float | None]:
    """Loss (nats a token) of the model and, for bytes, of a trigram table on the same held-out windows."""
    job = run.job
    windows = held_out_windows(corpus.held_out, job.workload.seq_len, job.train.held_out_tokens)
    share = len(windows) // job.dp
    if share == 0:  # fewer windows than data-parallel ranks: each of these scores them all
        mine, repeats = windows, job.dp
    else:
        windows = windows[: share * job.dp]
        mine, repeats = windows[run.dp_rank * share : (run.dp_rank + 1) * share], 1
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    run.model.module.eval()
    with torch.no_grad():
        for first in range(0, len(mine), job.micro_batch):
            batch = torch.from_numpy(mine[first : first + job.micro_batch]).to(run.device)
            total += run.model.module(batch[:, :-1], batch[:, 1:])
    dist.all_reduce(total)
    tokens = windows[:, 1:].size * repeats * job.layout.tp
    counted = trigram_loss(corpus.train, windows) if isinstance(run.tokenizer, ByteTokenizer) else None
    return float(total) / tokens, counted


def _sample(run: _Run) -> str:
    """Text that the trained model writes after the job's prompt."""
    train = run.job.train

    def logits(tokens: Tensor) -> Tensor:
        whole: Tensor = run.model.module(tokens.to(run.device))
        return whole

    encoded = run.tokenizer.encode((train.sample_prompt or "\n").encode())
    prompt = [int(token) for token in encoded]
    tokens = generate(logits, prompt, train.sample_tokens, run.job.workload.seq_len, train.seed)
    return run.tokenizer.decode(tokens)


def _summarise(run: _Run, corpus: Corpus) -> dict[str, Any]:
    """What ``summary.json`` says; every rank takes part."""
    job = run.job
    held_out, trigram = _held_out_loss(run, corpus)
    sample = _sample(run)
    mine = torch.tensor(run.phases.medians(), dtype=torch.float64, device=run.device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    counted = run.records[2:] or run.records
    step_time = median(record["step_time_s"] for record in counted)
    return {
        "name": job.name,
        "final_loss": run.records[-1]["loss"],
        "held_out_loss": held_out,
        "trigram_loss": trigram,
        "tokenizer": run.tokenizer.name,
        "token": run.tokenizer.unit,
        "median_step_time_s": step_time,
        "tokens_per_s": job.tokens_per_step / step_time,
        "exposed_comm_s": median(record["exposed_comm_s"] for record in counted),
        "layout": job.layout.model_dump() | {"dp": job.dp},
        "world_size": job.ranks,
        "device": run.device.type,
        "overlapped_calls": run.overlapped_calls,
        "parameters": count_parameters(job.model),
        "corpus": corpus.source,
        "time_per_rank_s": [dict(zip(PHASES, times.tolist(), strict=True)) for times in everyone],
        "sample": sample,
    }


def _print_summary(console: Console, summary: dict[str, Any], report: Path) -> None:
    ours, floor = summary["held_out_loss"], summary["trigram_loss"]
    beside = ""
    if floor is not None:
        beside = f", {'below' if ours < floor else 'not below'} a trigram table's {floor:.3f}"
    share = summary["exposed_comm_s"] / summary["median_step_time_s"]
    console.print(f"held-out loss  {ours:.3f} nats a {summary['token']}{beside}")
    console.print(
        f"speed          {summary['tokens_per_s']:,.0f} tokens/s, "
        f"{summary['median_step_time_s'] * 1e3:,.0f} ms a step, {share:.1%} of it exposed communication",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"report         {report}", highlight=False, soft_wrap=True)

"""Data-parallel training steps: our ZeRO engine beside stock FSDP2 and DDP, two interleaved ranks.

    python benchmarks/data_parallel.py --rate 1gbit --repetitions 15 --json data_parallel.json

All competitors train the same model from the same values on the same tokens; losses are compared first.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

from end_to_end import LR, MODEL, SEQ_LEN, SEQUENCES, VOCAB
from figures import Finding, Section, paired_ratio, table
from two_ranks import quartiles, run_benchmark, start_ranks, take_turns

LAYOUTS = {
    "brigata zero 2": {"zero": 2},
    "brigata zero 1": {"zero": 1},
    "brigata zero 3": {"zero": 3},
    "fsdp2 zero 2": {"zero": 2, "zero_engine": "fsdp2"},
    "fsdp2 zero 3": {"zero": 3, "zero_engine": "fsdp2"},
}
OURS = "brigata zero 2"
STOCK = {
    "fsdp2 zero 3": "as it comes (it reshards after forward)",
    "fsdp2 zero 2": "without resharding (`reshard_after_forward=False`)",
}
PARTS = ("start_of_forward_ms", "middle_ms", "end_of_backward_ms")


def run_rank(repetitions: int) -> dict[str, Any] | None:
    """One rank: build every competitor, check that losses agree, time them in turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (SEQUENCES, SEQ_LEN + 1), generator=generator)
    share = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    steps = {name: _brigata(layout, share) for name, layout in LAYOUTS.items()}
    steps["ddp"] = _ddp(share)
    losses = {name: [step()["loss"] for _ in range(3)] for name, step in steps.items()}
    for name, values in losses.items():
        for mine, other in zip(values, losses["ddp"], strict=True):
            assert abs(mine - other) < 1e-4, f"{name}: {losses}"
    exposed: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    samples = take_turns(steps, repetitions, lambda name, _, returned: exposed[name].append(returned))
    main = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    if not main:
        return None
    shown = {
        name: {part: median(e[part] for e in seen) for part in PARTS}
        for name, seen in exposed.items()
        if name in LAYOUTS
    }
    return {"losses": losses, "samples_ms": samples, "exposed_ms": shown}


def _brigata(layout: dict[str, Any], tokens: Any) -> Callable[[], dict[str, float]]:
    """A step of Brigata's model under ``layout``; also tells what was exposed, and where."""
    from brigata.describe import parse_job
    from brigata.parallel.apply import build_model
    from brigata.parallel.gradients import clip_gradients
    from brigata.parallel.mesh import build_mesh
    from brigata.train.optimizer import build_optimizer

    job = parse_job(
        {
            "version": 1,
            "model": MODEL | {"vocab": VOCAB},
            "workload": {"seq_len": SEQ_LEN, "global_batch": SEQUENCES},
            "layout": {"dp": 2} | layout,
            "train": {"lr": LR},
        }
    )
    model = build_model(job, build_mesh(job))
    optimizer = build_optimizer(job, model.parameters)

    def step() -> dict[str, float]:
        # Gathering begins here and not at the end of the step before, when other competitors would hide it.
        model.optimizer_stepped()
        loss = model.module(tokens[:, :-1], tokens[:, 1:]) / job.tokens_per_step
        loss.backward()
        model.finish_gradients()
        clip_gradients(model.parameters, 1.0, model.evidence)
        optimizer.step()
        optimizer.zero_grad()
        evidence = model.evidence.take()
        waits = [counted for name, counted in evidence.items() if name != "gradient_norm"]
        return {
            "loss": _over_ranks(loss),
            "start_of_forward_ms": sum(counted.head_s for counted in waits) * 1e3,
            "middle_ms": sum(counted.middle_s for counted in waits) * 1e3,
            "end_of_backward_ms": sum(counted.tail_s for counted in waits) * 1e3,
        }

    return step


def _ddp(tokens: Any) -> Callable[[], dict[str, float]]:
    """A step of the same decoder, whole on each rank, in PyTorch's DistributedDataParallel."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from brigata.describe import ModelSpec
    from brigata.model.decoder import Decoder
    from brigata.model.initial import initial_value

    spec = ModelSpec.model_validate(MODEL | {"vocab": VOCAB})
    model = Decoder(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, len(spec.pattern), 0, torch.float32))
    wrapped = DistributedDataParallel(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    counted = tokens[:, 1:].numel()

    def step() -> dict[str, float]:
        loss = wrapped(tokens[:, :-1], tokens[:, 1:]) / counted
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": _over_ranks(loss) / 2}

    return step


def _over_ranks(loss: Any) -> float:
    """Sum of the ranks' shares of the loss."""
    import torch.distributed as dist

    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total)


def measure(repetitions: int, quick: bool) -> dict[str, Any]:
    """What ``run_rank`` returns, at 1 Gbit/s."""
    return {"1gbit": start_ranks(__file__, "1gbit", repetitions)}


def findings(result: dict[str, Any]) -> list[Finding]:
    """Answers to what is asked at 1 Gbit/s."""
    if "1gbit" not in result:
        return []
    samples = result["1gbit"]["samples_ms"]
    found = []
    for stock, how in STOCK.items():
        ratio = paired_ratio(samples[OURS], samples[stock])
        asked = f"{OURS} at 1 Gbit/s: <= 0.6 of stock FSDP2's step, {how}"
        found.append(Finding(asked, str(ratio), ratio.median <= 0.6))
    ratio = paired_ratio(samples[OURS], samples["ddp"])
    found.append(Finding(f"{OURS} at 1 Gbit/s: below plain DDP's step", f"{ratio} of it", ratio.median < 1))
    return found


def render(result: dict[str, Any]) -> str:
    """A table of steps, and of what was exposed where, a rate."""
    parts = [
        "The model of the tensor-parallel steps, dp 2, each rank half of the sequences. All competitors "
        "train it from the same values on the same tokens (losses agree to 1e-4 over three steps) and take "
        "turns. Brigata's first gather begins inside the timed step. Times in ms, quartiles in brackets; "
        "exposed is the median time in which rank 0 waits for data-parallel messages (of `fully_shard` the "
        "time of its collectives, wherever in the step; DDP does not say)."
    ]
    for rate, measured in result.items():
        parts += [f"### {rate}", _table(measured)]
    return "\n\n".join(parts)


def _table(measured: dict[str, Any]) -> str:
    samples, exposed = measured["samples_ms"], measured["exposed_ms"]
    rows = []
    for name, times in samples.items():
        waits = [f"{exposed[name][part]:.0f}" if name in exposed else "" for part in PARTS]
        rows.append([name, quartiles(times), str(paired_ratio(times, samples[OURS])), *waits])
    header = ("", "step", f"over {OURS}", "exposed at start of forward", "between", "at end of backward")
    return table(header, rows)


SECTION = Section("Training steps, data parallel", 15, measure, findings, render)


if __name__ == "__main__":
    run_benchmark(__file__, __doc__ or "", run_rank, SECTION)

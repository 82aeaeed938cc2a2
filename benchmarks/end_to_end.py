"""Training steps of Brigata beside plain PyTorch, on two ranks, interleaved in one run.

    python benchmarks/end_to_end.py --rate 1gbit --repetitions 15 --json end_to_end_1gbit.json
    python benchmarks/end_to_end.py                                  # loopback

Every competitor lives in the same two processes and takes its steps in turn, so that a machine that slows
down slows all of them. Losses are compared first: all train the same model on the same tokens.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

MODEL = {"hidden": 512, "pattern": "*-*-*-*-", "heads": 8, "kv_heads": 4, "ffn": 1536}
SEQUENCES, SEQ_LEN, VOCAB, LR = 4, 512, 256, 1e-3
ORDERS = ("direct", "auto", "blocking_p2p")


def run_rank(repetitions: int) -> dict[str, Any] | None:
    """One rank: build every competitor, check that losses agree, time them in turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (SEQUENCES, SEQ_LEN + 1), generator=generator)
    steps: dict[str, Callable[[], float]] = {f"brigata {order}": _brigata(order, tokens) for order in ORDERS}
    steps["plain pytorch"] = _plain(mesh, tokens, steps)
    losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
    for name, values in losses.items():
        for ours, theirs in zip(values, losses["plain pytorch"], strict=True):
            assert abs(ours - theirs) < 1e-3, f"{name}: {losses}"
    samples: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for repetition in range(repetitions):
        for i in range(len(names)):
            name = names[(i + repetition) % len(names)]
            dist.barrier()
            start = perf_counter()
            steps[name]()
            duration = torch.tensor((perf_counter() - start) * 1e3)
            dist.all_reduce(duration, dist.ReduceOp.MAX)
            samples[name].append(float(duration))
    main = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return {"losses": losses, "samples_ms": samples} if main else None


def _brigata(order: str, tokens: Any) -> Callable[[], float]:
    """A step of Brigata's own model and loop parts in ``order``."""
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
            "layout": {"tp": 2, "overlap": order},
            "train": {"lr": LR},
        }
    )
    model = build_model(job, build_mesh(job))
    optimizer = build_optimizer(job, model.parameters)

    def step() -> float:
        loss = model.module(tokens[:, :-1], tokens[:, 1:]) / job.tokens_per_step
        loss.backward()
        model.finish_gradients()
        clip_gradients(model.parameters, 1.0, model.evidence)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step.model = model  # type: ignore[attr-defined]
    return step


def _plain(mesh: Any, tokens: Any, steps: dict[str, Any]) -> Callable[[], float]:
    """A step of plain PyTorch, from the same initial values."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    from plain_pytorch import PlainTransformer, parallelize_plain

    source = next(iter(steps.values())).model.module
    whole = {name: value.full_tensor() for name, value in source.named_parameters()}
    layers = len(MODEL["pattern"]) // 2
    model = PlainTransformer(
        VOCAB, MODEL["hidden"], layers, MODEL["heads"], MODEL["kv_heads"], MODEL["ffn"], SEQ_LEN
    )
    model.load_state_dict({_plain_name(name): value for name, value in whole.items()}, strict=True)
    parallelize_plain(model, mesh)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)

    def step() -> float:
        with loss_parallel():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)

    return step


def _plain_name(name: str) -> str:
    """Brigata's parameter names in the plain model."""
    fixed = {
        "embed.weight": "embeddings.weight",
        "head_loss.weight": "output.weight",
        "norm.weight": "norm.weight",
    }
    if name in fixed:
        return fixed[name]
    _, number, rest = name.split(".", 2)
    layer, feed_forward = divmod(int(number), 2)
    if rest == "norm.weight":
        return f"layers.{layer}.{'ffn' if feed_forward else 'attention'}_norm.weight"
    part = rest.removeprefix("block.").removesuffix(".weight")
    inner = {
        "project_in.q": "attention.wq", "project_in.k": "attention.wk", "project_in.v": "attention.wv",
        "project_in.gate": "feed_forward.w1", "project_in.up": "feed_forward.w3",
        "project_out": "feed_forward.w2" if feed_forward else "attention.wo",
    }  # fmt: skip
    return f"layers.{layer}.{inner[part]}.weight"


def print_table(samples: dict[str, list[float]], own: str) -> None:
    """Print medians, quartiles and how many times each takes as long as ``own``, paired by repetition."""
    print(f"{'':24s} median ms  quartiles     times {own} (median of paired ratios)")
    for name, times in samples.items():
        low, _, high = quantiles(times, n=4)
        ratio = median(other / mine for other, mine in zip(times, samples[own], strict=True))
        print(f"{name:24s} {median(times):9.0f}  {low:5.0f}-{high:5.0f}   {ratio:6.3f}")


def run_on_two_ranks(argv: list[str], rate: str | None) -> dict[str, Any]:
    """Run ``argv`` as two ranks, on loopback or on a shaped link; what rank 0 prints last, read as JSON."""
    from brigata.measure.namespaces import loopback_hosts, run_ranks, shaped_network

    if rate is None:
        outputs = run_ranks(loopback_hosts(2), argv, timeout_s=1800)
    else:
        with shaped_network(2, rate) as hosts:
            outputs = run_ranks(hosts, argv, timeout_s=1800)
    result: dict[str, Any] = json.loads(outputs[0].strip().splitlines()[-1])
    return result


def run_benchmark(
    script: str, text: str, run: Callable[[int], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """The command line of a two-rank benchmark: start ``script`` as two ranks, or be one of them.

    Returns what rank 0 measured; None in a rank.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="link rate, for instance 1gbit (Linux, root); default: loopback")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measured = run(options.repetitions)
        if measured is not None:
            print(json.dumps(measured))
        return None
    path = str(Path(script).resolve())
    argv = [sys.executable, path, "--rank", "--repetitions", str(options.repetitions)]
    result = run_on_two_ranks(argv, options.rate)
    print(f"2 ranks, {options.rate or 'loopback'}, {options.repetitions} interleaved repetitions")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return result


def main() -> None:
    """Start the ranks, or be one."""
    result = run_benchmark(__file__, __doc__ or "", run_rank)
    if result is not None:
        print_table(result["samples_ms"], f"brigata {ORDERS[0]}")


if __name__ == "__main__":
    main()

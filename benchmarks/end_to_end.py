"""Training steps of Brigata beside plain PyTorch, on two ranks, interleaved in one run.

    python benchmarks/end_to_end.py --rate 1gbit --repetitions 15 --json end_to_end_1gbit.json
    python benchmarks/end_to_end.py                                  # loopback

Every competitor lives in the same two processes and takes its steps in turn, so that a machine that slows
down slows all of them. Losses are compared first: all train the same model on the same tokens.

The operator-level limit is what a step would take if every operator hid all that can be hidden: the step
without the exposed time of its operators, plus what no order can hide (``operator_limit``), from each
operator call's own products and a bare exchange of a chunk in the same run. Each order has its own limit,
because products in pieces, and products beside messages, take longer; that of ``blocking_p2p`` is shown too.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

from figures import Finding, Section, paired_ratio, table
from two_ranks import quartiles, run_benchmark, start_ranks, take_turns

MODEL = {"hidden": 512, "pattern": "*-*-*-*-", "heads": 8, "kv_heads": 4, "ffn": 1536}
SEQUENCES, SEQ_LEN, VOCAB, LR = 4, 512, 256, 1e-3
ORDERS = ("direct", "auto", "blocking_p2p")
PLAIN, EXCHANGE, UNHURRIED = "plain pytorch", "exchange", "blocking_p2p"


def run_rank(repetitions: int) -> dict[str, Any] | None:
    """One rank: build every competitor, check that losses agree, time them in turn."""
    import torch
    import torch.distributed as dist

    from operator_limit import Recorder, Steps, exposed_s, operator_limit

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (SEQUENCES, SEQ_LEN + 1), generator=generator)
    steps: dict[str, Callable[[], Any]] = {f"brigata {order}": _brigata(order, tokens) for order in ORDERS}
    recorders = {name: Recorder(step.model.channel) for name, step in steps.items()}  # type: ignore[attr-defined]
    steps[PLAIN] = _plain(mesh, tokens, steps)
    losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
    for name, values in losses.items():
        for ours, theirs in zip(values, losses[PLAIN], strict=True):
            assert abs(ours - theirs) < 1e-3, f"{name}: {losses}"
    for recorder in recorders.values():
        recorder.take()
    noted = {name: Steps([], [], []) for name in recorders}

    def seen(name: str, own_ms: float, _: Any) -> None:
        if name in noted:
            calls, evidence = recorders[name].take()
            noted[name].own_ms.append(own_ms)
            noted[name].exposed_ms.append(exposed_s(evidence) * 1e3)
            noted[name].calls.append(calls)

    chunk_bytes, exchange = _exchange()
    samples = take_turns(steps | {EXCHANGE: exchange}, repetitions, seen)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: steps.plain() for name, steps in noted.items()})
    main = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    if not main:
        return None
    bytes_per_s = chunk_bytes / (median(samples[EXCHANGE]) / 1e3)
    limits = {name: operator_limit([rank[name] for rank in everyone], bytes_per_s) for name in noted}
    return {"losses": losses, "samples_ms": samples, "limits": limits, "chunk_bytes": chunk_bytes}


def _exchange() -> tuple[int, Callable[[], None]]:
    """Bytes of a chunk of activations, and a bare exchange of two of them between the ranks."""
    import torch
    import torch.distributed as dist

    from brigata.measure.overlap_cases import exchange_messages

    group = dist.group.WORLD
    assert group is not None
    chunk = torch.zeros(SEQUENCES * SEQ_LEN // dist.get_world_size(), MODEL["hidden"])
    start = exchange_messages(chunk, group)

    def exchange() -> None:
        for work in start():
            work.wait()

    exchange()
    return chunk.nbytes, exchange


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


def measure(repetitions: int, quick: bool) -> dict[str, Any]:
    """By rate, what ``run_rank`` returns; ``quick``: at 1 Gbit/s only."""
    rates = ("1gbit",) if quick else ("1gbit", "loopback")
    return {rate: start_ranks(__file__, None if rate == "loopback" else rate, repetitions) for rate in rates}


def findings(result: dict[str, Any]) -> list[Finding]:
    """Answers to what is asked at 1 Gbit/s and on loopback."""
    found = []
    if shaped := result.get("1gbit"):
        for order in ("auto", "direct"):
            name = f"`{order}` at 1 Gbit/s"
            found += [
                _times(shaped, PLAIN, order, f"{name}: >= 1.7 times plain PyTorch", 1.7),
                _times(shaped, f"brigata {UNHURRIED}", order, f"{name}: >= 1.12 times `blocking_p2p`", 1.12),
            ]
            over = paired_ratio(*_against_limit(shaped, f"brigata {order}"))
            found.append(Finding(f"{name}: within 8 % of the limit", f"{over} of it", over.median <= 1.08))
    if loopback := result.get("loopback"):
        for order in ("auto", "direct"):
            asked = f"`{order}` on loopback: >= 1.2 times plain PyTorch"
            found.append(_times(loopback, PLAIN, order, asked, 1.2))
    return found


def _times(measured: dict[str, Any], slower: str, order: str, asked: str, least: float) -> Finding:
    ratio = paired_ratio(measured["samples_ms"][slower], measured["samples_ms"][f"brigata {order}"])
    return Finding(asked, f"{ratio} times", ratio.median >= least)


def _against_limit(measured: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    return measured["samples_ms"][name], measured["limits"][name]["limit_ms"]


def render(result: dict[str, Any]) -> str:
    """A table of steps and limits a rate."""
    layers = len(MODEL["pattern"]) // 2
    parts = [
        f"{layers} layers, hidden {MODEL['hidden']}, {MODEL['heads']} heads, {MODEL['kv_heads']} key/value "
        f"heads, ffn {MODEL['ffn']}, vocabulary {VOCAB}, {SEQUENCES} sequences of {SEQ_LEN} tokens, fp32, "
        "tp 2; clip and fused AdamW included. All competitors live in the same two processes and take turns; "
        "their losses agree to 1e-3 over three steps. Times in ms, quartiles in brackets.",
        "*Limit*: the step without the exposed time of its operators, plus what no order can hide: for every "
        "operator call `max(0, lower bound - products)`, from the call's own measured products and a bare "
        "exchange of a chunk in the same run. Each order has its own limit, from its own steps; that of "
        "`blocking_p2p` is shown beside it, because its products are whole and have the processor to "
        "themselves.",
    ]
    for rate, measured in result.items():
        parts += [f"### {rate}", _table(measured)]
        exchange_ms = median(measured["samples_ms"][EXCHANGE])
        size = f"{measured['chunk_bytes'] / 2**20:g} MiB"
        parts.append(f"A bare exchange of {size} between the ranks takes {exchange_ms:.1f} ms.")
    return "\n\n".join(parts)


def _table(measured: dict[str, Any]) -> str:
    samples, limits = measured["samples_ms"], measured["limits"]
    strict_ms = limits[f"brigata {UNHURRIED}"]["limit_ms"]
    rows = []
    for name in [*limits, PLAIN]:
        cells = [name, quartiles(samples[name])]
        cells.append(str(paired_ratio(samples[name], samples["brigata auto"])))
        if name in limits:
            limit = limits[name]
            cells += [f"{median(limit['exposed_ms']):.0f}", f"{limit['inevitable_ms']:.0f}"]
            cells += [f"{median(limit['limit_ms']):.0f}", str(paired_ratio(*_against_limit(measured, name)))]
            cells.append(str(paired_ratio(samples[name], strict_ms)))
        else:
            cells += [""] * 5
        rows.append(cells)
    header = ("", "step", "over `auto`", "exposed", "no order can hide", "limit", "step over limit")
    return table((*header, f"over `{UNHURRIED}`'s limit"), rows)


SECTION = Section("Training steps, tensor parallel", 15, measure, findings, render)


if __name__ == "__main__":
    run_benchmark(__file__, __doc__ or "", run_rank, SECTION)

"""A mixture of experts forward and backward: ours, transformers' two ways, and the bare products.

    python benchmarks/experts.py                           # fp32 and bf16, 21 repetitions
    python benchmarks/experts.py --dtypes fp32 --repetitions 15 --json result.json

All take turns in one process on the same weights and tokens, and ratios are taken within a repetition. The
bare products are ``torch.mm`` and ``addmm_`` of the shapes that the experts need, into memory that is there
already: no routing, no sorting, no activation. ``bare as fp32`` is the same in fp32 whatever the dtype: what
a processor without fast 16-bit products can do at best.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from figures import Finding, findings_table, judge, paired_ratio, table

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS, THREADS = 1_024, 2_048, 8, 2, 2_048, 2
DTYPES = ("fp32", "bf16")
RIVALS = ("grouped_mm", "eager", "bare", "bare as fp32")
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


def build_steps(dtype: str) -> dict[str, Callable[[], Any]]:
    """By side, a function that runs forward and backward once; the three blocks return (output, x's gradient)."""
    import torch

    from brigata.describe import ModelSpec
    from brigata.model.experts import Experts
    from brigata.model.sequences import Sequences

    precision = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    torch.manual_seed(0)
    spec = ModelSpec.model_validate(
        {"pattern": "E", "hidden": HIDDEN, "experts": {"count": EXPERTS, "top_k": TOP_K, "ffn": FFN}}
    )
    ours = Experts(spec).to(precision)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.02)
    x = torch.randn(TOKENS, HIDDEN).to(precision).requires_grad_()
    dy = torch.randn(TOKENS, HIDDEN).to(precision)

    def step(block: Any, *rest: Any) -> Any:
        block.zero_grad(set_to_none=True)
        x.grad = None
        y = block(x[None] if not rest else x, *rest).view_as(x)
        y.backward(dy)
        return y.detach(), x.grad

    def sequences() -> Any:
        return Sequences(1, TOKENS, torch.arange(TOKENS))

    theirs = {kind: _theirs(ours, kind) for kind in ("grouped_mm", "eager")}
    with torch.no_grad():
        loads = sequences()
        ours.router(x, loads)
    counts = [int(count) for count in loads.routing[0].chosen]
    return {
        "brigata": lambda: step(ours, sequences()),
        **{kind: lambda block=block: step(block) for kind, block in theirs.items()},
        "bare": _bare(counts, precision),
        "bare as fp32": _bare(counts, torch.float32),
    }


def _theirs(ours: Any, kind: str) -> Any:
    """Mixtral's block of transformers with our weights, which it copies."""
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K,
        experts_implementation=kind,
    )  # fmt: skip
    block = MixtralSparseMoeBlock(config).to(ours.router.weight.dtype).train()
    assert block.experts.config._experts_implementation == kind
    with torch.no_grad():
        block.gate.weight.copy_(ours.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat([ours.products.gate, ours.products.up], dim=1))
        block.experts.down_proj.copy_(ours.products.down)
    return block


def _bare(counts: list[int], precision: Any) -> Callable[[], None]:
    """The nine products an expert, three forward and six backward, and nothing else."""
    import torch

    def filled(*shape: int) -> Any:
        return torch.randn(shape).to(precision)

    pieces = [
        (
            filled(n, HIDDEN),
            filled(n, FFN),
            filled(n, HIDDEN),
            filled(n, FFN),
            filled(FFN, HIDDEN),
            filled(HIDDEN, FFN),
        )
        for n in counts
    ]

    def step() -> None:
        for rows, inner, dx, out, weight, dweight in pieces:
            for _ in range(2):  # gate and up
                torch.mm(rows, weight.t(), out=out)
                torch.mm(inner.t(), rows, out=weight_like[0])
            torch.mm(inner, dweight.t(), out=dx)  # down
            torch.mm(rows, dweight, out=out)
            torch.mm(rows.t(), inner, out=weight_like[1])
            torch.mm(inner, weight, out=dx)
            dx.addmm_(inner, weight)

    weight_like = filled(FFN, HIDDEN), filled(HIDDEN, FFN)
    return step


def check(dtype: str, steps: dict[str, Callable[[], Any]]) -> None:
    """All three blocks give the same output and the same gradient."""
    found = {side: steps[side]() for side in ("brigata", "grouped_mm", "eager")}
    for side in ("grouped_mm", "eager"):
        for mine, other in zip(found["brigata"], found[side], strict=True):
            error = float((mine.float() - other.float()).norm() / other.float().norm())
            assert error < TOLERANCE[dtype], (side, error)


def measure(dtype: str, repetitions: int) -> dict[str, Any]:
    """Milliseconds of every step; the sides take turns, in the other direction every other time."""
    steps = build_steps(dtype)
    check(dtype, steps)
    samples: dict[str, list[float]] = {side: [] for side in steps}
    for repetition in range(repetitions):
        for side in list(steps)[:: 1 if repetition % 2 else -1]:
            start = perf_counter()
            steps[side]()
            samples[side].append((perf_counter() - start) * 1e3)
    ratios = {side: paired_ratio(samples["brigata"], samples[side]) for side in RIVALS}
    return {
        "dtype": dtype,
        "milliseconds": {side: median(times) for side, times in samples.items()},
        "ratios": {side: [ratio.median, ratio.low, ratio.high] for side, ratio in ratios.items()},
    }


def findings(rows: list[dict[str, Any]]) -> list[Finding]:
    """What was asked and whether it is met."""

    def ratios(side: str) -> dict[str, float]:
        return {row["dtype"]: row["ratios"][side][0] for row in rows}

    faster = {dtype: 1 / ratio for dtype, ratio in ratios("eager").items()}
    best = {row["dtype"]: max(row["ratios"][side][0] for side in ("bare", "bare as fp32")) for row in rows}
    return [
        judge("time at most that of transformers' grouped_mm", ratios("grouped_mm"), most=1.0),
        judge("at least 1.5 times the speed of transformers' eager", faster, least=1.5),
        judge("time at most 1.25 times the faster bare products", best, most=1.25),
    ]


def render(rows: list[dict[str, Any]]) -> str:
    """Times and ratios in Markdown."""
    cells = []
    for row in rows:
        times = row["milliseconds"]
        cells.append((row["dtype"], "brigata", f"{times['brigata']:.0f}", ""))
        for side in RIVALS:
            middle, low, high = row["ratios"][side]
            cells.append(
                (row["dtype"], side, f"{times[side]:.0f}", f"{middle:.3f} ({low:.3f} to {high:.3f})")
            )
    return table(("dtype", "side", "ms", "ours / theirs"), cells)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(THREADS)
    rows = [measure(dtype, options.repetitions) for dtype in options.dtypes]
    shape = f"{EXPERTS} experts, top {TOP_K}, hidden {HIDDEN:,}, expert ffn {FFN:,}, {TOKENS:,} tokens"
    print(f"{shape}, forward and backward, {THREADS} threads, {options.repetitions} repetitions.\n")
    print(f"{render(rows)}\n\n{findings_table(findings(rows))}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

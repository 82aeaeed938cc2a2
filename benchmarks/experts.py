"""A mixture of experts forward and backward: ours, transformers' two ways, and the bare products.

    python benchmarks/experts.py                           # fp32 and bf16, 21 repetitions
    python benchmarks/experts.py --dtypes fp32 --repetitions 15 --json result.json

All take turns in one process on the same weights and tokens, and ratios are taken within a repetition. The
bare products are ``torch.mm`` and ``addmm_`` of the shapes that the experts need, into memory that is there
already: no routing, no sorting, no activation; in fp32 where a processor's own 16-bit products are slower.
"""

import argparse
import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from figures import Finding, Ratio, Section, findings_table, judge, paired_ratio, table
from steps import child

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS, THREADS = 1_024, 2_048, 8, 2, 2_048, 2
DTYPES = ("fp32", "bf16")
RIVALS = ("grouped_mm", "eager", "bare")
HOPELESS = 6
"""Times our first step, beyond which a side is not run again."""
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
OTHER_CHOICE = {"fp32": 0.0, "bf16": 0.02}
"""Share of tokens that may go to other experts on the two sides."""


def build_steps(dtype: str) -> dict[str, Callable[[], Any]]:
    """By side, a function that runs forward and backward once; blocks return (output, dx)."""
    import torch

    from brigata.describe import ModelSpec
    from brigata.model.experts import Experts
    from brigata.model.sequences import Sequences
    from brigata.ops.products import slow_in_16_bits

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
        "bare": _bare(counts, torch.float32 if slow_in_16_bits(x) else precision),
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

    wide, narrow = filled(FFN, HIDDEN), filled(HIDDEN, FFN)  # weights of gate or up, and of down
    dwide, dnarrow = torch.empty_like(wide), torch.empty_like(narrow)
    pieces = [(filled(n, HIDDEN), filled(n, FFN), filled(n, HIDDEN), filled(n, FFN)) for n in counts]

    def step() -> None:
        for rows, inner, outer_out, inner_out in pieces:
            for _ in ("gate", "up"):
                torch.mm(rows, wide.t(), out=inner_out)
                torch.mm(inner.t(), rows, out=dwide)
            torch.mm(inner, narrow.t(), out=outer_out)
            torch.mm(rows, narrow, out=inner_out)
            torch.mm(rows.t(), inner, out=dnarrow)
            torch.mm(inner, wide, out=outer_out)
            outer_out.addmm_(inner, wide)

    return step


def check(dtype: str, found: dict[str, Any]) -> None:
    """All three blocks gave the same output and the same gradient.

    In bf16 a few tokens may differ: transformers rounds Mixtral's router logits to bf16, ours stay fp32, so
    that near ties choose other experts.
    """
    for side in ("grouped_mm", "eager"):
        for mine, other in zip(found["brigata"], found[side], strict=True):
            errors = (mine.float() - other.float()).norm(dim=1) / other.float().norm(dim=1)
            beyond = float((errors > TOLERANCE[dtype]).float().mean())
            assert beyond <= OTHER_CHOICE[dtype], (side, beyond)


def measure(dtype: str, repetitions: int) -> dict[str, Any]:
    """Milliseconds of every step; the sides take turns, in the other direction every other time.

    A side whose first step takes ``HOPELESS`` times ours is not run again: that step is its only sample.
    """
    steps = build_steps(dtype)
    samples: dict[str, list[float]] = {}
    found = {}
    for side, step in steps.items():
        start = perf_counter()
        found[side] = step()
        samples[side] = [(perf_counter() - start) * 1e3]
    check(dtype, found)
    again = [side for side in steps if samples[side][0] < HOPELESS * samples["brigata"][0]]
    samples |= {side: [] for side in again}
    for repetition in range(repetitions):
        for side in again[:: 1 if repetition % 2 else -1]:
            start = perf_counter()
            steps[side]()
            samples[side].append((perf_counter() - start) * 1e3)
    ours = samples["brigata"]
    ratios = {side: paired_ratio(ours[: len(samples[side])], samples[side]) for side in RIVALS}
    return {
        "dtype": dtype,
        "repetitions": {side: len(times) for side, times in samples.items()},
        "milliseconds": {side: median(times) for side, times in samples.items()},
        "ratios": {side: [ratio.median, *_interval(ratio)] for side, ratio in ratios.items()},
    }


def _interval(ratio: Ratio) -> list[float | None]:
    """Its ends; None where there were too few repetitions."""
    return [ratio.low, ratio.high] if ratio.high < inf else [None, None]


def findings(rows: list[dict[str, Any]]) -> list[Finding]:
    """What was asked and whether it is met."""

    def ratios(side: str) -> dict[str, float]:
        return {row["dtype"]: row["ratios"][side][0] for row in rows}

    faster = {dtype: 1 / ratio for dtype, ratio in ratios("eager").items()}
    return [
        judge("time at most that of transformers' grouped_mm", ratios("grouped_mm"), most=1.0),
        judge("at least 1.5 times the speed of transformers' eager", faster, least=1.5),
        judge("time at most 1.25 times the bare products", ratios("bare"), most=1.25),
    ]


def render(rows: list[dict[str, Any]]) -> str:
    """Times and ratios in Markdown."""
    cells = []
    for row in rows:
        for side, time in row["milliseconds"].items():
            ratio = ""
            if side in row["ratios"]:
                middle, low, high = row["ratios"][side]
                ratio = f"{middle:.3f}" + ("" if low is None else f" ({low:.3f} to {high:.3f})")
            cells.append((row["dtype"], side, str(row["repetitions"][side]), f"{time:.0f}", ratio))
    return table(("dtype", "side", "repetitions", "ms", "ours / theirs"), cells)


SHAPE = f"{EXPERTS} experts, top {TOP_K}, hidden {HIDDEN:,}, expert ffn {FFN:,}, {TOKENS:,} tokens"


def measure_all(repetitions: int, quick: bool) -> dict[str, Any]:
    """All dtypes, in a fresh process each; ``quick``: one."""
    dtypes = DTYPES[:1] if quick else DTYPES
    calls = (("--row", dtype, "--repetitions", str(repetitions)) for dtype in dtypes)
    return {"rows": [child(__file__, *call) for call in calls]}


SECTION = Section(
    f"Mixture of experts, {SHAPE}: beside transformers and the bare products",
    15,
    measure_all,
    lambda result: findings(result["rows"]),
    lambda result: render(result["rows"]),
)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--row", metavar="DTYPE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(THREADS)
    if options.row:
        print(json.dumps(measure(options.row, options.repetitions)))
        return
    rows = [measure(dtype, options.repetitions) for dtype in options.dtypes]
    print(f"{SHAPE}, forward and backward, {THREADS} threads, {options.repetitions} repetitions.\n")
    print(f"{render(rows)}\n\n{findings_table(findings(rows))}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

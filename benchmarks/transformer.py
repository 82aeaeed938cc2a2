"""A Llama's forward and backward, ours and that of transformers, in one run: time and memory.

    python benchmarks/transformer.py                           # fp32 and bf16
    python benchmarks/transformer.py --dtypes fp32 --repetitions 21

Both take turns in one process, and ratios are taken within a repetition. Peak memory is the peak of the
resident set above what the process held before its first step, gradients included; each in a fresh process.
Where a step of transformers takes more than 6 of ours, one is measured (bf16 without fast 16-bit products).
"""

import argparse
import json
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from figures import Finding, Section, judge, paired_ratio, report, table
from steps import child, interval, peak_mib, take_turns, with_interval

SIDES = ("brigata", "transformers")
DTYPES = ("fp32", "bf16")
THREADS = 2
HIDDEN, LAYERS, HEADS, FFN, VOCAB, TOKENS = 512, 8, 8, 1408, 49_152, 1_024


def build_step(side: str, dtype: str) -> Callable[[], float]:
    """A function that runs forward and backward once and returns the loss (nats a token)."""
    import torch

    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (1, TOKENS + 1))
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    return (_ours if side == "brigata" else _theirs)(tokens, precision)


def _ours(tokens: Any, precision: Any) -> Callable[[], float]:
    import torch

    from brigata.describe import ModelSpec
    from brigata.model.decoder import Decoder

    spec = ModelSpec(pattern=f"(*-){LAYERS}", hidden=HIDDEN, heads=HEADS, ffn=FFN, vocab=VOCAB)
    model = Decoder(spec, precision).to(precision)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(std=0.02)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(tokens[:, :-1], tokens[:, 1:]) / TOKENS
        loss.backward()
        return float(loss.detach())

    return step


def _theirs(tokens: Any, precision: Any) -> Callable[[], float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        intermediate_size=FFN, vocab_size=VOCAB, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(precision).train()
    # shift_labels: every token of the input has a target, as on our side.
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    return step


def build_steps(dtype: str) -> dict[str, Callable[[], Any]]:
    """By side, a function that runs forward and backward once."""
    steps = {side: build_step(side, dtype) for side in SIDES}
    return dict(steps)


def measure(dtypes: Sequence[str], repetitions: int) -> list[dict[str, Any]]:
    """One row a dtype."""
    rows = []
    for dtype in dtypes:
        times = child(__file__, "--times", dtype, "--repetitions", str(repetitions))
        peaks = {side: child(__file__, "--peak", side, dtype) for side in SIDES}
        count = min(len(samples) for samples in times.values())
        ratio = paired_ratio(*(times[side][:count] for side in SIDES))
        rows.append(
            {
                "dtype": dtype,
                "repetitions": count,
                "milliseconds": {side: median(times[side]) for side in SIDES},
                "time_ratio": [ratio.median, *interval(ratio)],
                "peak_mib": peaks,
                "peak_ratio": peaks["brigata"] / peaks["transformers"],
            }
        )
    return rows


def findings(result: dict[str, Any]) -> list[Finding]:
    """What was asked and whether it is met."""
    rows = result["rows"]
    times = {row["dtype"]: row["time_ratio"][0] for row in rows}
    peaks = {row["dtype"]: row["peak_ratio"] for row in rows}
    return [
        judge("not slower than transformers", times, most=1.0),
        judge("at most 0.8 of its peak memory", peaks, most=0.8),
    ]


def render(result: dict[str, Any]) -> str:
    """Times, peaks and ratios in Markdown."""
    cells = []
    for row in result["rows"]:
        times, peaks = row["milliseconds"], row["peak_mib"]
        cells.append(
            (
                row["dtype"],
                str(row["repetitions"]),
                f"{times['brigata']:.0f} / {times['transformers']:.0f}",
                with_interval(row["time_ratio"]),
                f"{peaks['brigata']:.0f} / {peaks['transformers']:.0f}",
                f"{row['peak_ratio']:.3f}",
            )
        )
    return table(("dtype", "pairs", "ms, ours / theirs", "ratio", "peak MiB, ours / theirs", "ratio"), cells)


SHAPE = f"hidden {HIDDEN}, {LAYERS} layers, {HEADS} heads, ffn {FFN}, vocabulary {VOCAB:,}, {TOKENS:,} tokens"
SECTION = Section(
    f"Llama, {SHAPE}: beside transformers with its fused attention",
    15,
    lambda repetitions, quick: {"rows": measure(("fp32",) if quick else DTYPES, repetitions)},
    findings,
    render,
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repetitions", type=int, default=SECTION.repetitions)
    parser.add_argument("--times", metavar="DTYPE", help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.times or options.peak:
        import torch

        torch.set_num_threads(THREADS)
        if options.times:
            found: Any = take_turns(build_steps(options.times), options.repetitions)
        else:
            found = peak_mib(lambda: build_step(*options.peak))
        print(json.dumps(found))
        return
    print(report(SECTION, {"rows": measure(options.dtypes, options.repetitions)}))


if __name__ == "__main__":
    main()

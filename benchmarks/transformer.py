"""A Llama's forward and backward, ours and that of transformers, in one run: time and memory.

    python benchmarks/transformer.py                           # fp32 and bf16, 21 repetitions
    python benchmarks/transformer.py --dtypes fp32 --repetitions 15 --json result.json

Both take turns in one process, and ratios are taken within a repetition. Peak memory is the peak of the
resident set above what the process held before its first step, gradients included; each in a fresh process.
On a processor without fast 16-bit products a bf16 step of transformers takes minutes: see --repetitions.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from figures import paired_ratio, table

SIDES = ("brigata", "transformers")
DTYPES = ("fp32", "bf16")
THREADS = 2
HIDDEN, LAYERS, HEADS, FFN, VOCAB, TOKENS = 512, 8, 8, 1408, 49_152, 1_024
ASKED = "forward + backward: time at most 1.0 and peak memory at most 0.8 of transformers'"


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


def measure_times(dtype: str, repetitions: int) -> dict[str, list[float]]:
    """Milliseconds of every step; the sides take turns, each goes first every other time."""
    steps = {side: build_step(side, dtype) for side in SIDES}
    losses = {side: step() for side, step in steps.items()}
    assert max(losses.values()) - min(losses.values()) < 0.2, losses  # two random models of one kind
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    for repetition in range(repetitions):
        for side in SIDES[:: 1 if repetition % 2 else -1]:
            start = perf_counter()
            steps[side]()
            samples[side].append((perf_counter() - start) * 1e3)
    return samples


def measure_peak(side: str, dtype: str) -> float:
    """Peak of the resident set during a step above what was held before (MiB); for a fresh process."""
    import torch

    torch.ones(64, 64) @ torch.ones(64, 64)  # libraries that are loaded with the first product
    step = build_step(side, dtype)
    before = _status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew from here
    step()
    return _status_mib("VmHWM") - before


def _status_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def _child(*arguments: str) -> Any:
    """What this script prints as JSON when it is run with ``arguments``."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def measure(dtypes: list[str], repetitions: int) -> list[dict[str, Any]]:
    """One row a dtype."""
    rows = []
    for dtype in dtypes:
        times = _child("--times", dtype, "--repetitions", str(repetitions))
        peaks = {side: _child("--peak", side, dtype) for side in SIDES}
        ratio = paired_ratio(times["brigata"], times["transformers"])
        rows.append(
            {
                "dtype": dtype,
                "milliseconds": {side: median(times[side]) for side in SIDES},
                "time_ratio": [ratio.median, ratio.low, ratio.high],
                "peak_mib": peaks,
                "peak_ratio": peaks["brigata"] / peaks["transformers"],
                "met": ratio.median <= 1.0 and peaks["brigata"] <= 0.8 * peaks["transformers"],
            }
        )
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """A table in Markdown."""
    cells = []
    for row in rows:
        times, peaks = row["milliseconds"], row["peak_mib"]
        middle, low, high = row["time_ratio"]
        cells.append(
            (
                row["dtype"],
                f"{times['brigata']:.0f} / {times['transformers']:.0f}",
                f"{middle:.3f} ({low:.3f} to {high:.3f})",
                f"{peaks['brigata']:.0f} / {peaks['transformers']:.0f}",
                f"{row['peak_ratio']:.3f}",
                "yes" if row["met"] else "**no**",
            )
        )
    heads = ("dtype", "ms, ours / theirs", "ratio", "peak MiB, ours / theirs", "ratio", "met")
    return table(heads, cells)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--times", metavar="DTYPE", help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.times or options.peak:
        import torch

        torch.set_num_threads(THREADS)
        found = (
            measure_times(options.times, options.repetitions)
            if options.times
            else measure_peak(*options.peak)
        )
        print(json.dumps(found))
        return
    rows = measure(options.dtypes, options.repetitions)
    shape = f"hidden {HIDDEN}, {LAYERS} layers, {HEADS} heads, ffn {FFN}, vocabulary {VOCAB:,}"
    print(f"Llama, {shape}, {TOKENS:,} tokens, {THREADS} threads, {options.repetitions} repetitions.")
    print(f"Asked: {ASKED}.\n\n{render(rows)}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

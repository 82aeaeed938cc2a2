"""Mamba-2 forward and backward, ours and the torch path of transformers, in one run: time and memory.

    python benchmarks/mamba.py                           # one block and a model of 4, fp32 and bf16
    python benchmarks/mamba.py --dtypes fp32 --repetitions 21

Both have the same weights and take turns in one process; ratios are taken within a repetition. Peak memory is
the peak of the resident set above what the process held before its first step; each in a fresh process. Where
a step of transformers takes more than 6 of ours, one is measured (bf16 without fast 16-bit products).
"""

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any

from figures import Finding, Section, judge, report, table
from steps import child, peak_mib, take_turns

SIDES = ("brigata", "transformers")
DTYPES = ("fp32", "bf16")
SUBJECTS = ("block", "model")
THREADS, TOKENS, HIDDEN, LAYERS, VOCAB = 2, 2_048, 512, 4, 4_096
SHAPE = {"heads": 16, "head_dim": 64, "state": 128, "groups": 1}


def build_steps(subject: str, dtype: str) -> dict[str, Callable[[], Any]]:
    """By side, a function that runs forward and backward once."""
    import torch

    precision = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    torch.manual_seed(0)
    return _model_steps(precision) if subject == "model" else _block_steps(precision)


def _spec(pattern: str) -> Any:
    from brigata.describe import ModelSpec

    return ModelSpec.model_validate({"pattern": pattern, "hidden": HIDDEN, "vocab": VOCAB, "mamba": SHAPE})


def _config() -> Any:
    from transformers import Mamba2Config

    return Mamba2Config(
        hidden_size=HIDDEN, num_heads=SHAPE["heads"], head_dim=SHAPE["head_dim"], state_size=SHAPE["state"],
        n_groups=SHAPE["groups"], expand=2, num_hidden_layers=LAYERS, vocab_size=VOCAB,
        tie_word_embeddings=True,
    )  # fmt: skip


def _fill(module: Any) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1 if "norm" in name or name.endswith("D") else 0)


def _block_steps(precision: Any) -> dict[str, Callable[[], Any]]:
    import torch
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    from brigata.model.mamba import Mamba
    from brigata.model.sequences import Sequences

    ours, theirs = Mamba(_spec("M"), 0).to(precision), Mamba2Mixer(_config(), 0).to(precision)
    _fill(ours)
    _fill(theirs)
    x = torch.randn(1, TOKENS, HIDDEN).to(precision).requires_grad_()
    dy = torch.randn(1, TOKENS, HIDDEN).to(precision)
    sequences = Sequences(1, TOKENS, torch.arange(TOKENS))
    return {
        "brigata": lambda: ours(x[0], sequences).backward(dy[0]),
        "transformers": lambda: theirs(x).backward(dy),
        "bare": _bare(),
    }


def _bare() -> Callable[[], None]:
    """The products of the projections in and out, forward and backward, in fp32, and nothing else."""
    import torch

    inner, state = SHAPE["heads"] * SHAPE["head_dim"], SHAPE["groups"] * SHAPE["state"]
    shapes = [(HIDDEN, n) for n in (inner, inner, state, state, SHAPE["heads"])] + [(inner, HIDDEN)]
    pieces = [
        (torch.randn(TOKENS, k), torch.randn(n, k), torch.empty(TOKENS, n), torch.empty(n, k))
        for k, n in shapes
    ]

    def step() -> None:
        for x, weight, y, dweight in pieces:
            torch.mm(x, weight.t(), out=y)
            torch.mm(y.t(), x, out=dweight)
            torch.mm(y, weight, out=x)

    return step


def _model_steps(precision: Any) -> dict[str, Callable[[], Any]]:
    import torch
    from transformers import Mamba2ForCausalLM

    from brigata.model.decoder import Decoder

    ours = Decoder(_spec(f"M{LAYERS}"), precision).to(precision)
    theirs = Mamba2ForCausalLM(_config()).to(precision).train()
    _fill(ours)
    _fill(theirs)
    tokens = torch.randint(0, VOCAB, (1, TOKENS))
    return {
        "brigata": lambda: (ours(tokens, tokens) / TOKENS).backward(),
        "transformers": lambda: theirs(tokens, labels=tokens).loss.backward(),
    }


def measure(subject: str, dtype: str, repetitions: int) -> dict[str, Any]:
    """One row: times in one process, peaks in fresh ones."""
    times = child(__file__, "--times", subject, dtype, "--repetitions", str(repetitions))
    peaks = {side: child(__file__, "--peak", subject, dtype, side) for side in SIDES}
    count = min(len(times[side]) for side in SIDES)
    paired = zip(times["transformers"][:count], times["brigata"][:count], strict=True)
    return {
        "subject": subject,
        "dtype": dtype,
        "repetitions": count,
        "milliseconds": {side: median(times[side]) for side in SIDES},
        "faster": median(theirs / ours for theirs, ours in paired),
        "peak_mib": peaks,
        "peak_ratio": peaks["brigata"] / peaks["transformers"],
        "bare_ms": median(times["bare"]) if "bare" in times else None,
    }


def findings(result: dict[str, Any]) -> list[Finding]:
    """What was asked and whether it is met."""

    def figures(key: str) -> dict[str, float]:
        return {f"{row['subject']} {row['dtype']}": row[key] for row in result["rows"]}

    most = {
        f"{row['subject']} {row['dtype']}": row["milliseconds"]["transformers"] / row["bare_ms"]
        for row in result["rows"]
        if row["bare_ms"] is not None
    }
    return [
        judge("at least 4 times the speed of transformers' torch path", figures("faster"), least=4.0),
        Finding(
            "transformers over the products of the projections alone, in fp32: no implementation is faster",
            ", ".join(f"{row} {ratio:.2f}" for row, ratio in most.items()),
            None,
        ),
        judge("at most half its peak memory", figures("peak_ratio"), most=0.5),
    ]


def render(result: dict[str, Any]) -> str:
    """Times, peaks and ratios in Markdown."""
    heads = (
        "subject",
        "dtype",
        "pairs",
        "ms, ours / theirs",
        "times faster",
        "bare products, ms",
        "peak MiB, ours / theirs",
        "ratio",
    )
    cells = []
    for row in result["rows"]:
        times, peaks = row["milliseconds"], row["peak_mib"]
        cells.append(
            (
                row["subject"],
                row["dtype"],
                str(row["repetitions"]),
                f"{times['brigata']:.0f} / {times['transformers']:.0f}",
                f"{row['faster']:.2f}",
                "" if row["bare_ms"] is None else f"{row['bare_ms']:.0f}",
                f"{peaks['brigata']:.0f} / {peaks['transformers']:.0f}",
                f"{row['peak_ratio']:.3f}",
            )
        )
    return table(heads, cells)


def measure_all(repetitions: int, quick: bool) -> dict[str, Any]:
    """All subjects in all dtypes; ``quick``: one."""
    cases = [(subject, dtype) for subject in SUBJECTS for dtype in DTYPES][: 1 if quick else None]
    return {"rows": [measure(subject, dtype, repetitions) for subject, dtype in cases]}


SECTION = Section(
    f"Mamba-2, hidden {HIDDEN}, {SHAPE['heads']} heads of {SHAPE['head_dim']}, state {SHAPE['state']}, "
    f"{TOKENS:,} tokens: beside transformers' torch path",
    15,
    measure_all,
    findings,
    render,
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repetitions", type=int, default=SECTION.repetitions)
    parser.add_argument("--times", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.times or options.peak:
        import torch

        torch.set_num_threads(THREADS)
        if options.times:
            found: Any = take_turns(build_steps(*options.times), options.repetitions)
        else:
            subject, dtype, side = options.peak
            found = peak_mib(lambda: build_steps(subject, dtype)[side])
        print(json.dumps(found))
        return
    cases = [(subject, dtype) for subject in options.subjects for dtype in options.dtypes]
    rows = [measure(subject, dtype, options.repetitions) for subject, dtype in cases]
    print(report(SECTION, {"rows": rows}))


if __name__ == "__main__":
    main()

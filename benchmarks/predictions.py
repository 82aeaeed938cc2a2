"""Predicted beside measured training steps on this machine, after a calibration of it.

    python benchmarks/predictions.py                           # calibrates, then 12 jobs in 2 rounds
    python benchmarks/predictions.py --quick                   # a quick calibration and 4 jobs, once

Small jobs in fp32 on one and two local ranks: attention and MLP, Mamba-2, experts; tp, dp and ZeRO. Every
job is a run of `brigata train` of a few steps, of which the first two do not count; rounds over all jobs
follow each other, and a job's step is the median over them. Predictions rest on the calibration alone:
nothing was fitted on a run.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from figures import Finding, Section, judge, report, table

ATTENTION = {"hidden": 256, "pattern": "(*-)4", "heads": 8, "kv_heads": 4, "ffn": 768}
WIDE = {"hidden": 512, "pattern": "(*-)4", "heads": 8, "ffn": 1536}
MAMBA = {
    "hidden": 256,
    "pattern": "(M-)4",
    "ffn": 768,
    "mamba": {"heads": 16, "head_dim": 32, "state": 64, "groups": 2},
}
EXPERTS = {
    "hidden": 256,
    "pattern": "(*E)4",
    "heads": 8,
    "kv_heads": 4,
    "experts": {"count": 8, "top_k": 2, "ffn": 384},
}
JOBS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "attention": (ATTENTION, {}),
    "attention, tp 2": (ATTENTION, {"tp": 2}),
    "attention, dp 2, ZeRO-1": (ATTENTION, {"dp": 2, "zero": 1}),
    "attention, dp 2, ZeRO-3": (ATTENTION, {"dp": 2, "zero": 3}),
    "wide attention": (WIDE, {}),
    "wide attention, tp 2": (WIDE, {"tp": 2}),
    "wide attention, dp 2, ZeRO-2": (WIDE, {"dp": 2, "zero": 2}),
    "Mamba-2": (MAMBA, {}),
    "Mamba-2, tp 2": (MAMBA, {"tp": 2}),
    "Mamba-2, dp 2, ZeRO-2": (MAMBA, {"dp": 2, "zero": 2}),
    "experts": (EXPERTS, {}),
    "experts, dp 2, ZeRO-2": (EXPERTS, {"dp": 2, "zero": 2}),
}
"""Name -> model and layout."""
QUICK = ("attention", "attention, tp 2", "Mamba-2", "experts, dp 2, ZeRO-2")
STEPS = 10
SEQ_LEN, BATCH = 256, 4
WITHIN = 0.25
"""Relative error of a step's time that is asked for."""


def job_of(name: str, cluster: Path) -> dict[str, Any]:
    """A job as its file would have it."""
    model, layout = JOBS[name]
    return {
        "version": 1,
        "model": model,
        "cluster": {"file": str(cluster)},
        "workload": {"seq_len": SEQ_LEN, "global_batch": BATCH},
        "layout": layout,
        "train": {
            "steps": STEPS,
            "held_out_tokens": SEQ_LEN,
            "sample_tokens": 0,
            "save_weights": False,
        },
    }


def train(job: dict[str, Any], out: Path) -> tuple[float, int]:
    """Median seconds a step, and the bytes of the fullest rank, of a run."""
    command = [sys.executable, str(Path(__file__).resolve()), "--train", json.dumps(job), str(out)]
    subprocess.run(command, check=True, capture_output=True)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    peak = max(json.loads(line)["peak_memory_bytes"] for line in lines)
    return summary["median_step_time_s"], peak


def predicted(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds and bytes that are predicted, and where the time goes."""
    from brigata.describe import parse_job
    from brigata.measure.predicted import predict_run

    found = predict_run(parse_job(job))
    total = found.memory[found.fullest].total
    return {"seconds": found.seconds, "bytes": total, "breakdown": found.iteration.breakdown}


def measure(repetitions: int, quick: bool) -> dict[str, Any]:
    """Calibrate, then train every job ``repetitions`` times in rounds."""
    from brigata.measure.calibrate import calibrate
    from brigata.measure.calibrate_report import write_cluster

    with TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.toml"
        found = calibrate(quick=quick)
        write_cluster(found.device, cluster)
        jobs = {name: job_of(name, cluster) for name in (QUICK if quick else JOBS)}
        runs: dict[str, list[tuple[float, int]]] = {name: [] for name in jobs}
        for repetition in range(repetitions):
            for index, (name, job) in enumerate(jobs.items()):
                runs[name].append(train(job, Path(folder) / f"{repetition}-{index}"))
        rows = [
            {
                "name": name,
                "measured_s": [seconds for seconds, _ in runs[name]],
                "measured_bytes": max(peak for _, peak in runs[name]),
                "predicted": predicted(job),
            }
            for name, job in jobs.items()
        ]
    errors = {fit.name: fit.error for fit in found.fits}
    return {"device": found.device.model_dump(exclude_none=True), "errors": errors, "rows": rows}


def _ratios(result: dict[str, Any]) -> dict[str, float]:
    return {r["name"]: r["predicted"]["seconds"] / median(r["measured_s"]) for r in result["rows"]}


def findings(result: dict[str, Any]) -> list[Finding]:
    """What was asked and whether it is met."""
    off = {name: abs(ratio - 1) for name, ratio in _ratios(result).items()}
    return [
        judge(f"a step's time within {WITHIN:.0%} in the mean", {"mean": mean(off.values())}, most=WITHIN),
        judge(f"each step's time within {WITHIN:.0%}", off, most=WITHIN),
    ]


def render(result: dict[str, Any]) -> str:
    """A row a job in Markdown."""
    rows = []
    for row, ratio in zip(result["rows"], _ratios(result).values(), strict=True):
        guess = row["predicted"]
        parts = sorted(guess["breakdown"].items(), key=lambda part: -part[1])[:4]
        times = "/".join(f"{1e3 * seconds:.0f}" for seconds in row["measured_s"])
        rows.append(
            (
                row["name"],
                f"{1e3 * guess['seconds']:.0f}",
                times,
                f"{ratio:.2f}",
                ", ".join(f"{kind} {1e3 * seconds:.0f}" for kind, seconds in parts),
                f"{guess['bytes'] / 2**20:.0f} / {row['measured_bytes'] / 2**20:.0f}",
            )
        )
    device, errors = result["device"], result["errors"]
    peak, curves = 1e3 * device["peak_tflops"]["fp32"], device["curves"]
    text = (
        f"Calibrated: fp32 {peak:.0f} Gflop/s, memory {device['memory_gbs']:.0f} GB/s, loopback "
        f"{device['link_gbs']:.2g} GB/s and {curves['network_us']:.0f} µs, two ranks at "
        f"{curves['sustained']:.0%}. Errors of the fits: "
        + ", ".join(f"{name} {error:.0%}" for name, error in errors.items())
        + "."
    )
    header = ("job", "predicted ms", "measured ms", "ratio", "predicted most of it for (ms)", "MiB")
    return f"{text}\n\n{table(header, rows)}\n\nMiB: predicted / measured, of the fullest rank."


SECTION = Section("Predicted and measured steps of this machine", 2, measure, findings, render)


def run_job(job: str, out: str) -> None:
    """Train a job that is given in JSON."""
    from brigata.describe import parse_job
    from brigata.train.launch import launch

    launch(parse_job(json.loads(job)), out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, help=f"rounds; default: {SECTION.repetitions}")
    parser.add_argument("--quick", action="store_true", help="few jobs, to see that everything runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", nargs=2, metavar=("JOB", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        run_job(*options.train)
        return
    result = measure(options.repetitions or (1 if options.quick else SECTION.repetitions), options.quick)
    print(report(SECTION, result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

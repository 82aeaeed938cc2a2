"""`brigata train` from the shell: what a run leaves, and how it ends when something goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from brigata.train.world import first_host, surrounding_world

TINY = """
version = 1
name = "tiny"
[model]
hidden = 32
pattern = "*-"
heads = 4
[workload]
seq_len = 32
global_batch = 4
[layout]
tp = 2
[train]
steps = {steps}
data = "{data}"
held_out_tokens = 256
sample_tokens = 4
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    return path


def job_file(folder: Path, text: Path, steps: int) -> Path:
    path = folder / "tiny.toml"
    path.write_text(TINY.format(steps=steps, data=text))
    return path


def start(*argv: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "brigata.cli", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )


def started_ranks(process: subprocess.Popen[str], metrics: Path) -> list[psutil.Process]:
    """The rank processes, once the run has written its first step."""
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run wrote no step within 60 s"
        time.sleep(0.05)
    children = psutil.Process(process.pid).children()
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def assert_gone(ranks: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


def check_trace(events: list[dict[str, Any]]) -> None:
    """Both ranks show products, waits and messages on one clock: whatever is received was sent before."""
    for rank in (0, 1):
        seen = {event["cat"] for event in events if event["pid"] == rank and event["ph"] != "M"}
        assert seen >= {"phase", "compute", "wait", "message"}
    phases = {
        rank: [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["cat"] == "phase"]
        for rank in (0, 1)
    }
    begin, end = (min(e["ts"] for e in phases[0]), max(e["ts"] + e["dur"] for e in phases[0]))
    assert all(begin - 1e5 < e["ts"] < end + 1e5 for e in phases[1])
    starts = sorted(e["ts"] for e in events if e["ph"] == "b")
    assert len(starts) == len([e for e in events if e["ph"] == "e"])


def test_a_run_leaves_metrics_summary_and_report(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    traced = ["--set", "train.trace_steps=[2, 3]"]
    process = start("train", str(job_file(tmp_path, text, 5)), "--out", str(out), *traced)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(5))
    assert steps[0].keys() == {
        "step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "exposed_comm_s",
        "peak_memory_bytes",
    }  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    assert summary["final_loss"] == steps[-1]["loss"]
    assert summary["world_size"] == 2
    assert summary["overlapped_calls"] > 0
    assert summary["layout"]["tp"] == 2
    assert 0 < summary["held_out_loss"] < 6
    assert summary["parameters"] == 32 * 256 * 2 + 32 * 3 + 4 * 32 * 32 + 3 * 32 * 128
    assert "held-out loss" in printed
    check_trace(json.loads((out / "trace.json").read_text())["traceEvents"])
    assert "<html" in (out / "report.html").read_text()[:2000]
    again = start("train", str(job_file(tmp_path, text, 5)), "--out", str(out))
    assert "holds a run already" in again.communicate(timeout=60)[1]
    assert again.returncode == 2


def test_a_killed_rank_is_named_and_nothing_stays_behind(tmp_path: Path, text: Path) -> None:
    process = start("train", str(job_file(tmp_path, text, 1_000_000)), "--out", str(tmp_path / "run"))
    ranks = started_ranks(process, tmp_path / "run" / "metrics.jsonl")
    assert len(ranks) == 2
    ranks[1].kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"(process {ranks[1].pid}) was ended by SIGKILL" in errors
    assert "rank " in errors
    assert_gone(ranks)


def test_a_rank_that_raises_is_named_with_its_error(tmp_path: Path, text: Path) -> None:
    (tmp_path / "run" / "summary.json").mkdir(parents=True)  # rank 0 cannot write its summary
    process = start("train", str(job_file(tmp_path, text, 2)), "--out", str(tmp_path / "run"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("rank 0 (process ")
    assert "failed: IsADirectoryError" in errors


def test_interrupting_ends_every_rank(tmp_path: Path, text: Path) -> None:
    process = start("train", str(job_file(tmp_path, text, 1_000_000)), "--out", str(tmp_path / "run"))
    ranks = started_ranks(process, tmp_path / "run" / "metrics.jsonl")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "stopped by the user; every rank was ended"
    assert_gone(ranks)


def test_a_refused_job_ends_with_code_2_before_any_rank(tmp_path: Path, text: Path) -> None:
    job = str(job_file(tmp_path, text, 5))
    for change, sentence in {
        "layout.tp=3": "layout.tp = 3 does not divide model.heads = 4; use 1, 2 or 4",
        "layout.tpp=2": "did you mean layout.tp?",
        "train.data=gone": "train.data = 'gone' is not there",
        "cluster.devices=3": "cluster.devices = 3 is no multiple",
        "workload.seq_len=65536": "train.data",
    }.items():
        process = start("train", job, "--set", change, "--out", str(tmp_path / "run"))
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2, errors
        assert sentence in errors
        assert "Traceback" not in errors
        assert not (tmp_path / "run").exists()
    process = start("train", job, "--out", f"{text}/run")
    assert "name a folder that can be made" in process.communicate(timeout=60)[1]
    assert process.returncode == 2


def test_a_world_of_another_size_is_refused(tmp_path: Path, text: Path) -> None:
    job = str(job_file(tmp_path, text, 5))
    process = start("train", job, environment={"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "the layout needs 2 ranks (layout.tp = 2, layout.dp = 1) but the world has 3" in errors


def test_the_surrounding_world_is_read_from_torchrun_or_slurm() -> None:
    assert surrounding_world({}) is None
    assert surrounding_world({"RANK": "1", "WORLD_SIZE": "2"}) == {}
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "41"}
    world = surrounding_world({**slurm, "SLURM_STEP_NODELIST": "gpu[07-08]"})
    assert world is not None
    assert (world["RANK"], world["WORLD_SIZE"], world["MASTER_ADDR"]) == ("3", "8", "gpu07")
    assert [first_host(nodes) for nodes in ("a", "a,b", "n[3,5-7]x", "login-1")] == [
        "a",
        "a",
        "n3",
        "login-1",
    ]

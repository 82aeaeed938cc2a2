"""`brigata simulate`, `validate` and `devices` from the shell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "jobs" / "llama3-405b.toml"
KEYS = {
    "iteration_time_s",
    "low_s",
    "high_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "model_tflops_per_device",
    "mfu",
    "hfu",
    "breakdown_s",
    "memory_bytes",
    "fits",
    "oom_probability",
    "energy_j",
    "tier",
}


def brigata(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "brigata.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={"COLUMNS": "100", "PATH": ""}
    )


def test_simulate_prints_writes_and_traces(tmp_path: Path) -> None:
    result = brigata("simulate", JOB, "--json", tmp_path / "a.json", "--trace", tmp_path / "a.trace.json")
    assert result.returncode == 0, result.stderr
    for word in ("step", "MFU", "products", "bubble", "optimizer", "Memory of a device", "activations"):
        assert word in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
    found = json.loads((tmp_path / "a.json").read_text())
    assert found.keys() == KEYS
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["iteration_time_s"])
    assert found["low_s"] < found["iteration_time_s"] < found["high_s"]
    assert found["tier"] == "micro-measurements"
    events = json.loads((tmp_path / "a.trace.json").read_text())["traceEvents"]
    assert len(events) > 1000 and {event["ph"] for event in events} == {"M", "X"}


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; sys.argv = ['brigata', 'simulate', 'jobs/llama3-405b.toml']\n"
        "from brigata.cli import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("cluster.preset=h101", "cluster.preset = 'h101' is not known; use local, a100-sxm4-40gb"),
        ("cluster.software=excel", "cluster.software = 'excel' is not known; use brigata"),
        ("layout.tp=7", "layout.tp = 7 does not divide model.heads = 128"),
        ("layout.schedule=1f1b", "layout.schedule = '1f1b' has one stage a rank"),
        ("layout.ep=2", "layout.ep = 2, and model.pattern has no experts; use layout.ep = 1"),
        ("layout.virtual_stages=99", "layout.pp * layout.virtual_stages = 792 is more than the 252 units"),
        ("layout.recompute_layers=2", "layout.recompute_layers = 2 goes with layout.recompute = 'full'"),
        ("layout.cp=3", "layout.cp = 3 does not divide workload.seq_len = 8192; use 8193 tokens"),
        ("workload.micro_batch=3", "workload.micro_batch = 3 does not divide"),
    ],
)
def test_what_cannot_be_planned_is_refused(override: str, sentence: str) -> None:
    result = brigata("simulate", JOB, "--set", override)
    assert result.returncode == 2
    assert sentence in " ".join(result.stderr.split())


def test_a_described_job_does_not_run() -> None:
    result = brigata("train", JOB)
    assert result.returncode == 2
    assert "cluster.preset = 'h100-sxm5-80gb' is described, not here" in result.stderr
    assert "pipeline parallelism does not run yet" in result.stderr


def test_an_unmeasured_device_is_a_prediction_from_its_specification(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    result = brigata("simulate", JOB, "--set", "cluster.preset=mi300x-192gb", "--json", file)
    assert result.returncode == 0 and json.loads(file.read_text())["tier"] == "specification"


def test_a_run_anchors_the_prediction(tmp_path: Path) -> None:
    from brigata.describe.job import load_job
    from brigata.simulate.prediction import predict

    job = load_job(JOB, [], run=False)
    plain = predict(job)
    (tmp_path / "job.json").write_text(job.model_dump_json(), encoding="utf-8")
    (tmp_path / "summary.json").write_text(
        json.dumps({"median_step_time_s": 2 * plain.seconds}), encoding="utf-8"
    )
    anchored = predict(job, tmp_path)
    assert anchored.tier == "anchored"
    assert anchored.seconds == pytest.approx(2 * plain.seconds)
    assert anchored.high - anchored.low < plain.high - plain.low
    result = brigata("simulate", JOB, "--anchor", tmp_path / "absent")
    assert result.returncode == 2 and "is no finished run" in result.stderr


def test_validate_shows_errors_parameters_and_refusals(tmp_path: Path) -> None:
    file = tmp_path / "errors.json"
    result = brigata("validate", "--json", file, "--refused")
    assert result.returncode == 0, result.stderr
    for word in (
        "Step time by source",
        "korthikanti2022-t5",
        "order of layouts",
        "memory,",
        "fitted parameters",
    ):
        assert word in result.stdout
    assert json.loads(file.read_text())["simulated"] > 90
    assert "source_key" in brigata("validate", "--columns").stdout
    assert brigata("validate", tmp_path / "absent.csv").returncode == 2


def test_devices_are_listed() -> None:
    result = brigata("devices")
    assert result.returncode == 0
    assert "h100-sxm5-80gb" in result.stdout and "megatron-2024" in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())

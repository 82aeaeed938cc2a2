"""`brigata calibrate` describes this machine: the file is read again, its curves say what was measured."""

import json
import platform
import tomllib
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from brigata.cli_calibrate import calibrate_command
from brigata.cost.collectives import inside_seconds
from brigata.cost.curves import attention_seconds, kernel_seconds, product_seconds
from brigata.cost.kernels import Attention, Product, Scan
from brigata.describe import JobError, parse_job
from brigata.describe.device import (
    AttentionCurve,
    CollectiveCurve,
    Curves,
    DeviceSpec,
    ProductCurve,
    ScanCurve,
    load_device,
    read_device,
)
from brigata.measure import calibrate_fit
from brigata.measure.calibrate import Calibration, _threads, calibrate
from brigata.measure.calibrate_report import show_calibration, write_cluster
from brigata.measure.predicted import compare, predict_run
from brigata.validate.statistics import spearman

CPU = load_device("cpu")
LAYERS = [(8, 64, 64), (64, 256, 256), (300, 100, 800), (512, 512, 1536), (2048, 1024, 4096)]
PRODUCTS = [
    kernel
    for tokens, outputs, inputs in LAYERS
    for layer in [Product(tokens, outputs, inputs, itemsize=4)]
    for kernel in (layer, layer.input_gradient, layer.weight_gradient)
]
CORES = [
    Attention(1, length, length, 8, 4, 32, backward=backward, itemsize=4)
    for length in (8, 32, 64, 128, 256, 512, 1024, 2048)
    for backward in (False, True)
]


@pytest.fixture(scope="module")
def found() -> Calibration:
    return calibrate(quick=True)


@pytest.fixture(scope="module")
def file(found: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "cluster.toml"
    write_cluster(found.device, path)
    return path


def test_the_file_describes_the_device_that_was_found(found: Calibration, file: Path) -> None:
    assert read_device(file) == found.device
    assert found.device.fitted == f"{found.measurements} measurements of this machine"


def test_products_are_ordered_as_they_were_measured(found: Calibration, file: Path) -> None:
    """How near they are depends on what else the machine does; that a larger one takes longer does not."""
    device = read_device(file)
    device = device.model_copy(update={"curves": device.curves.model_copy(update={"sustained": 1.0})})
    assert set(found.products) == {"fp32", "fp64", "bf16"}
    for precision, products in found.products.items():
        predicted = [kernel_seconds(device, kernel, precision) for kernel, _ in products]
        assert spearman(predicted, [seconds for _, seconds in products]) > 0.8, (precision, products)


def test_rates_and_latencies_are_positive(file: Path) -> None:
    device = read_device(file)
    assert all(peak > 0 for peak in device.peak_tflops.values())
    assert device.memory_gbs > 0.1
    assert device.link_gbs > 0.001
    assert device.curves.network_us > 0
    assert 0.5 <= device.curves.sustained <= 1.05
    operations = {"send", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert set(device.curves.collective) == operations
    assert all(curve.base_us > 0 and curve.share > 0 for curve in device.curves.collective.values())


def test_the_file_tells_nothing_of_host_and_user(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert platform.node() not in text or not platform.node()
    assert str(Path.home()) not in text
    assert not tomllib.loads(text).keys() & {"host", "hostname", "user"}


def test_threads_of_the_caller_stay_as_they_were() -> None:
    before = torch.get_num_threads()
    with _threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_table_fits_into_100_columns(found: Calibration) -> None:
    console = Console(file=StringIO(), width=100)
    show_calibration(found, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(fit.name in text for fit in found.fits)
    assert "%" in text
    assert max(map(len, text.splitlines())) <= 100


def test_an_existing_file_is_refused(tmp_path: Path) -> None:
    there = tmp_path / "cluster.toml"
    there.write_text("mine", encoding="utf-8")
    with pytest.raises(JobError, match="--force"):
        calibrate_command(out=there)
    assert there.read_text(encoding="utf-8") == "mine"


def test_a_missing_folder_and_no_threads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="make it first"):
        calibrate_command(out=tmp_path / "none" / "cluster.toml")
    with pytest.raises(JobError, match="--threads 0"):
        calibrate_command(out=tmp_path / "cluster.toml", threads=0)


def test_a_run_is_compared_with_what_its_cluster_file_predicts(file: Path) -> None:
    job = parse_job(
        {
            "version": 1,
            "model": {"hidden": 64, "pattern": "*-", "heads": 4, "ffn": 128},
            "cluster": {"file": str(file), "software": "megatron-2024"},
            "workload": {"seq_len": 64, "global_batch": 2},
            "layout": {"tp": 1},
        }
    )
    predicted = predict_run(job)
    assert predicted.job.cluster.software == "brigata"
    assert predicted.tier == "micro-measurements"
    console = Console(file=StringIO(), width=100)
    console.print(compare(job, 2 * predicted.seconds, 0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.50" in text
    assert "–" in text


def described(**curves: object) -> DeviceSpec:
    return CPU.model_copy(update={"curves": Curves.model_validate(curves)})


def close(fit: calibrate_fit.Fit, true: dict[str, float]) -> None:
    assert fit.error < 0.02
    for key, value in true.items():
        assert fit.parameters[key] == pytest.approx(value, rel=0.1), (key, fit.parameters)


def test_fit_of_products_recovers_parameters() -> None:
    true = {"rate": 0.8, "launch_us": 12.0, "memory": 0.3, "tile": 0.4}
    curve, peak = ProductCurve(**true), CPU.peak("fp32")
    times = [product_seconds(CPU, curve, (k.m, k.n, k.k), 1, k.bytes, peak) for k in PRODUCTS]
    close(calibrate_fit.fit_products(CPU, "fp32", PRODUCTS, times), true)


def test_fit_of_attention_recovers_parameters() -> None:
    true = {"rate": 0.3, "backward": 0.7, "launch_us": 60.0, "ramp": 90.0}
    times = [attention_seconds(CPU, AttentionCurve(**true), k, CPU.peak("fp32")) for k in CORES]
    close(calibrate_fit.fit_attention(CPU, CORES, times), true)


def test_fit_of_collectives_recovers_parameters() -> None:
    true = {"base_us": 150.0, "share": 0.6, "half_mb": 0.5}
    sizes = [2.0**10, 2.0**14, 2.0**18, 2.0**21, 2.0**24]
    curve = CollectiveCurve(**true)
    times = [inside_seconds(CPU, curve, "all_gather", size, 2) for size in sizes]
    close(calibrate_fit.fit_collective(CPU, "all_gather", sizes, times), true)


def test_fit_of_the_scan_recovers_the_rate_in_spite_of_an_outlier() -> None:
    lengths = (128, 256, 512, 1024, 2048, 4096)
    scans = [Scan(tokens, 8, 64, state, 1, 64, itemsize=4) for tokens in lengths for state in (16, 128)]
    device = described(scan=ScanCurve(processor_tflops=0.02, memory=0.6, launch_us=200.0).model_dump())
    times = [kernel_seconds(device, scan, "fp32") for scan in scans]
    times[4] *= 3
    found = calibrate_fit.fit_scan(CPU, scans, times)
    assert found.parameters["processor_tflops"] == pytest.approx(0.02, rel=0.1)


def test_a_run_is_compared_with_its_prediction(tmp_path: Path) -> None:
    from rich.console import Console

    from brigata.describe.job import load_job
    from brigata.measure.predicted import compare_run, predict_run

    job = load_job(Path(__file__).parents[1] / "jobs" / "demo.toml")
    predicted = predict_run(job).seconds
    (tmp_path / "summary.json").write_text(
        json.dumps({"median_step_time_s": 2 * predicted}), encoding="utf-8"
    )
    (tmp_path / "metrics.jsonl").write_text('{"peak_memory_bytes": 1048576}\n', encoding="utf-8")
    console = Console(record=True, width=100)
    console.print(compare_run(job, tmp_path))
    shown = console.export_text()
    assert "0.50" in shown and "1 MiB" in shown

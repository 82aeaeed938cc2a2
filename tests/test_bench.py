"""`brigata bench overlap` checks numerics, measures what it says, and refuses what cannot be measured."""

import json
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from brigata.cli import app
from brigata.describe import JobError
from brigata.describe.order import parse_order
from brigata.measure.overlap_bench import bench_overlap
from brigata.measure.overlap_cases import OPERATIONS, PASSES, Shape
from brigata.overlap.auto import CANDIDATES
from brigata.overlap.evidence import Evidence

ORDERS = ["blocking", "blocking_p2p", "sliced:4", "ring", "direct:2", "auto"]


@pytest.mark.parametrize("op", OPERATIONS)
def test_json_has_every_order_as_typed(op: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["bench", "overlap", "--op", op, "--pass", "backward", "--tokens", "64", "--hidden", "32"]
    arguments += ["--ffn", "48", "--orders", ",".join(ORDERS), "--repetitions", "3", "--json", str(file)]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0, printed.output
    result = json.loads(file.read_text())
    assert list(result["orders"]) == ORDERS
    for figures in result["orders"].values():
        assert figures["time_ms"] > 0
        assert figures.keys() == {"time_ms", "predicted_ms", "exposed_ms", "ratio_to_contended", "chosen"}
    chosen = {order: figures["chosen"] for order, figures in result["orders"].items()}
    assert parse_order(chosen.pop("auto")) in CANDIDATES
    assert chosen == {order: order for order in ORDERS if order != "auto"}
    assert all(result[key] > 0 for key in ("compute_ms", "comm_ms", "contended_ms", "second_core_share"))
    assert all(len(samples) == 3 for samples in result["samples_ms"].values())


@pytest.mark.parametrize("op", OPERATIONS)
def test_emulated_products_take_the_time_they_are_given(op: str) -> None:
    shape = Shape(op, "forward", 64, 32, 48)
    result = bench_overlap(shape, 2, ["blocking_p2p", "direct"], 3, None, product_ms=5.0)
    assert result["product_ms"] == 5.0
    assert 10 <= result["compute_ms"] < 15
    assert all(figures["time_ms"] >= 10 for figures in result["orders"].values())


def test_evidence_keeps_products_apart_from_waits() -> None:
    evidence = Evidence()
    start = time.perf_counter()
    for _ in range(2):
        with evidence.computing("ours", "output"):
            time.sleep(0.02)
    with evidence.waiting("ours", "tail", torch.device("cpu")):
        time.sleep(0.01)
    elapsed_s = time.perf_counter() - start
    counted = evidence.take()["ours"]
    assert counted.products == 2
    assert counted.compute_s >= 0.04
    assert counted.exposed_s >= 0.01
    assert counted.compute_s + counted.exposed_s <= elapsed_s
    assert evidence.take() == {}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"op": "matmul"}, "--op 'matmul' is not known; use all_gather_linear or linear_reduce_scatter"),
        ({"direction": "sideways"}, "--pass 'sideways' is not known; use forward or backward"),
        ({"tokens": 63}, "--tokens 63 is no multiple of --ranks 2"),
        ({"ffn": 0}, "must be positive"),
        ({"ranks": 1}, "--ranks 1 has nothing to overlap; use 2 or more"),
        ({"orders": ["spiral"]}, "--orders: 'spiral' is no order; use blocking"),
        ({"repetitions": 0}, "--repetitions 0 measures nothing"),
        ({"rate": "fast"}, "fast"),
        ({"product_ms": 0.0}, "--emulate 0 is no time"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, object], sentence: str) -> None:
    shape = {"op": "linear_reduce_scatter", "direction": "forward", "tokens": 64, "hidden": 32, "ffn": 48}
    rest: dict[str, object] = {"ranks": 2, "orders": ["ring"], "repetitions": 1, "rate": None}
    for name, value in changes.items():
        (shape if name in shape else rest)[name] = value  # type: ignore[index]
    assert set(PASSES) == {"forward", "backward"}
    with pytest.raises(JobError) as refusal:
        bench_overlap(Shape(**shape), **rest)  # type: ignore[arg-type]
    assert sentence in str(refusal.value)

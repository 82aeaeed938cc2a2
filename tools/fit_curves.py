"""Fits of single curves: robust least squares on the logarithm of the time, every fourth row held out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from brigata.cost.collectives import inside_seconds
from brigata.cost.curves import attention_seconds, kernel_seconds, product_seconds, quantise_seconds
from brigata.cost.kernels import Attention, Grouped, Scan
from brigata.describe.device import AttentionCurve, CollectiveCurve, DeviceSpec, ProductCurve, ScanCurve

Row = dict[str, str]
ITEM_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Bytes of an element of the operands; results are 2 bytes wide."""


@dataclass(frozen=True)
class Fit:
    """A fitted curve: median, mean, bias of the error on ``held``-out rows, the median on ``kept`` ones."""

    name: str
    parameters: dict[str, float]
    rows: int
    held: tuple[float, float, float]
    kept: float


def fit(
    name: str,
    start: dict[str, float],
    bounds: dict[str, tuple[float, float]],
    predict: Callable[[dict[str, float], int], float],
    measured: Sequence[float],
) -> Fit | None:
    """Fit the parameters in ``start`` so that ``predict`` is near ``measured`` (seconds), row by row."""
    if len(measured) < 8:
        return None
    held = np.arange(len(measured)) % 4 == 3
    target = np.log(np.asarray(measured))
    keys = list(start)

    def errors(values: np.ndarray, which: np.ndarray) -> np.ndarray:
        parameters = dict(zip(keys, map(float, values), strict=True))
        return np.array([np.log(predict(parameters, int(i))) for i in np.flatnonzero(which)]) - target[which]

    low, high = zip(*(bounds[key] for key in keys), strict=True)
    found = least_squares(
        lambda v: errors(v, ~held),
        [start[key] for key in keys],
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.1,
        x_scale=[max(start[k], 1e-3) for k in keys],
        diff_step=1e-3,
        max_nfev=40,
    )
    off = np.expm1(errors(found.x, held))
    kept = float(np.median(np.abs(np.expm1(errors(found.x, ~held)))))
    quality = (float(np.median(abs(off))), float(np.mean(abs(off))), float(np.mean(off)))
    return Fit(
        name,
        {k: round(float(v), 4) for k, v in zip(keys, found.x, strict=True)},
        len(measured),
        quality,
        kept,
    )


def fit_products(device: DeviceSpec, precision: str, rows: Sequence[Row]) -> Fit | None:
    """Matrix products of one precision."""
    shapes = [(int(r["m"]), int(r["n"]), int(r["k"])) for r in rows]
    wide, peak = ITEM_BYTES[precision], device.peak(precision)

    def predict(parameters: dict[str, float], i: int) -> float:
        m, n, k = shapes[i]
        moved = wide * (m * k + k * n) + 2.0 * m * n
        seconds = product_seconds(device, ProductCurve(**parameters), shapes[i], 1, moved, peak)
        return seconds + quantise_seconds(device, precision, m * k)

    return fit(
        f"product {precision}",
        {"rate": 0.75, "launch_us": 4.0, "memory": 0.8, "tile": 0.1},
        {"rate": (0.1, 1.2), "launch_us": (0, 40), "memory": (0.1, 1.1), "tile": (0, 2)},
        predict,
        [float(r["latency_ms"]) / 1e3 for r in rows],
    )


def fit_attention(device: DeviceSpec, rows: Sequence[Row]) -> Fit | None:
    """Fused attention, causal prefill and decoding."""
    cores = [_core(r) for r in rows]

    def predict(parameters: dict[str, float], i: int) -> float:
        return attention_seconds(device, AttentionCurve(**parameters), cores[i], device.peak("bf16"))

    return fit(
        "attention",
        {"rate": 0.5, "launch_us": 6.0, "ramp": 500.0, "memory": 0.7},
        {"rate": (0.05, 1), "launch_us": (0, 60), "ramp": (0, 5000), "memory": (0.05, 1.2)},
        predict,
        [float(r["latency_ms"]) / 1e3 for r in rows],
    )


def _core(row: Row) -> Attention:
    new, past = int(row["isl"]), int(row["past_kv"])
    return Attention(
        int(row["batch"]),
        new,
        new + past,
        int(row["num_heads"]),
        int(row["num_kv_heads"]),
        int(row["head_dim"]),
    )


def fit_grouped(device: DeviceSpec, precision: str, rows: Sequence[Row]) -> Fit | None:
    """A layer of experts: two grouped products (gate with up, down), balanced or nearly."""
    shapes = []
    for r in rows:
        chosen = int(r["num_tokens"]) * int(r["topk"]) // int(r["moe_ep"])
        experts, inner = int(r["num_experts"]) // int(r["moe_ep"]), int(r["inter"]) // int(r["moe_tp"])
        hidden = int(r["hidden"])
        rows_here = max(chosen, 1)
        shapes.append(
            (Grouped(rows_here, 2 * inner, hidden, experts), Grouped(rows_here, hidden, inner, experts))
        )

    def predict(parameters: dict[str, float], i: int) -> float:
        curves = device.curves.model_copy(update={"grouped": {precision: ProductCurve(**parameters)}})
        return sum(
            kernel_seconds(device.model_copy(update={"curves": curves}), k, precision) for k in shapes[i]
        )

    return fit(
        f"grouped {precision}",
        {"rate": 0.6, "launch_us": 20.0, "memory": 0.7, "tile": 0.2},
        {"rate": (0.05, 1.2), "launch_us": (0, 200), "memory": (0.05, 1.1), "tile": (0, 2)},
        predict,
        [float(r["latency_ms"]) / 1e3 for r in rows],
    )


def fit_scan(device: DeviceSpec, rows: Sequence[Row]) -> Fit | None:
    """Mamba-2's scan."""
    scans = [
        Scan(
            int(r["batch"]) * int(r["seq_len"]),
            int(r["nheads"]),
            int(r["head_dim"]),
            int(r["d_state"]),
            int(r["n_groups"]),
            int(r["chunk_size"]),
        )
        for r in rows
        if int(r["seq_len"]) >= int(r["chunk_size"])
    ]
    rows = [r for r in rows if int(r["seq_len"]) >= int(r["chunk_size"])]

    def predict(parameters: dict[str, float], i: int) -> float:
        curves = device.curves.model_copy(update={"scan": ScanCurve(**parameters)})
        return kernel_seconds(device.model_copy(update={"curves": curves}), scans[i])

    return fit(
        "scan",
        {"processor_tflops": 0.5, "memory": 0.5, "launch_us": 30.0},
        {"processor_tflops": (0.01, 5), "memory": (0.01, 1), "launch_us": (0, 500)},
        predict,
        [float(r["latency_ms"]) / 1e3 for r in rows],
    )


def fit_collective(device: DeviceSpec, operation: str, rows: Sequence[Row]) -> Fit | None:
    """A collective inside a node, two ranks to all."""
    cases = [(int(r["num_gpus"]), float(r["message_bytes"])) for r in rows]

    def predict(parameters: dict[str, float], i: int) -> float:
        ranks, size = cases[i]
        return inside_seconds(device, CollectiveCurve(**parameters), operation, size, ranks)

    return fit(
        operation,
        {"base_us": 8.0, "hop_us": 1.5, "share": 0.75, "half_mb": 2.0},
        {"base_us": (0, 60), "hop_us": (0, 10), "share": (0.05, 1.4), "half_mb": (0, 60)},
        predict,
        [float(r["latency_ms"]) / 1e3 for r in rows],
    )

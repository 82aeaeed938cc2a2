"""Fits of a device's curves to times measured on it: damped least squares on logarithms, with numpy alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from brigata.cost.collectives import inside_seconds
from brigata.cost.curves import attention_seconds, kernel_seconds, product_seconds
from brigata.cost.kernels import Attention, Kernel, Product, Scan
from brigata.describe.device import (
    AttentionCurve,
    CollectiveCurve,
    DeviceSpec,
    ProductCurve,
    ScanCurve,
    StreamCurve,
)

Parameters = dict[str, float]
ROBUST = 0.1
"""Relative error beyond which a measurement counts less."""
GRID, STARTS, STEPS = 5, 6, 40
"""Values a parameter on the coarse grid, best points of it that are refined, and steps of a refinement."""


@dataclass(frozen=True)
class Fit:
    """A fitted curve.

    Attributes:
        name: of the curve.
        parameters: that were found.
        measured: seconds of each case.
        predicted: seconds by the curve.
    """

    name: str
    parameters: Parameters
    measured: tuple[float, ...]
    predicted: tuple[float, ...]

    @property
    def error(self) -> float:
        """Median absolute relative error."""
        return float(np.median(np.abs(np.divide(self.predicted, self.measured) - 1)))


def fit(
    name: str,
    bounds: dict[str, tuple[float, float]],
    predict: Callable[[Parameters], Sequence[float]],
    measured: Sequence[float],
) -> Fit:
    """Find parameters for which ``predict`` is near ``measured``.

    Args:
        name: of the curve.
        bounds: parameter -> smallest and largest value, both positive.
        predict: seconds of every case.
        measured: seconds of every case.
    """
    keys = list(bounds)
    low, high = (np.log([bounds[key][side] for key in keys]) for side in (0, 1))
    target = np.log(np.asarray(measured))

    def errors(point: np.ndarray) -> np.ndarray:
        off: np.ndarray = np.log(np.asarray(predict(_named(keys, point)))) - target
        return off

    marks = (np.arange(GRID) + 0.5) / GRID
    grid = [low + (high - low) * np.array(place) for place in product(marks, repeat=len(keys))]
    grid.sort(key=lambda point: _cost(errors(point)))
    best = min((_refine(errors, point, low, high) for point in grid[:STARTS]), key=lambda p: _cost(errors(p)))
    parameters = {key: float(f"{value:.5g}") for key, value in _named(keys, best).items()}
    return Fit(name, parameters, tuple(measured), tuple(predict(parameters)))


def _named(keys: Sequence[str], point: np.ndarray) -> Parameters:
    return dict(zip(keys, map(float, np.exp(point)), strict=True))


def _cost(errors: np.ndarray) -> float:
    """Sum of squares of small errors, of twice the size of large ones."""
    return float(np.sum(np.sqrt(1 + (errors / ROBUST) ** 2) - 1))


def _refine(
    errors: Callable[[np.ndarray], np.ndarray], start: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Levenberg-Marquardt with weights that fall with the error, inside the bounds."""
    point, damping, nudge = start, 1e-2, 1e-3
    now = errors(point)
    for _ in range(STEPS):
        slopes = [(errors(point + nudge * axis) - now) / nudge for axis in np.eye(len(point))]
        weights = 1 / np.sqrt(1 + (now / ROBUST) ** 2)
        jacobian = np.stack(slopes, 1)
        normal = jacobian.T @ (weights[:, None] * jacobian)
        pull = jacobian.T @ (weights * now)
        step = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-6 * np.eye(len(pull))), pull)
        tried = np.clip(point - step, low, high)
        found = errors(tried)
        if _cost(found) < _cost(now):
            moved = float(np.max(np.abs(tried - point)))
            point, now, damping = tried, found, max(damping / 5, 1e-6)
            if moved < 1e-4:
                break
        elif damping > 1e6:
            break
        else:
            damping *= 5
    return point


def fit_products(
    device: DeviceSpec, precision: str, kernels: Sequence[Product], measured: Sequence[float]
) -> Fit:
    """Products of one precision."""
    peak = device.peak(precision)

    def predict(parameters: Parameters) -> list[float]:
        curve = ProductCurve(**parameters)
        return [product_seconds(device, curve, (k.m, k.n, k.k), k.count, k.bytes, peak) for k in kernels]

    bounds = {"rate": (0.2, 1.3), "launch_us": (0.2, 200.0), "memory": (0.02, 4.0), "tile": (0.01, 2.0)}
    return fit(f"product {precision}", bounds, predict, measured)


def fit_grouped(device: DeviceSpec, kernels: Sequence[Sequence[Kernel]], measured: Sequence[float]) -> Fit:
    """Feed-forwards of experts in fp32: grouped products, and work by the device's fitted stream curve."""
    return _fit_kernels(
        "grouped fp32",
        {"rate": (0.05, 1.3), "launch_us": (0.2, 2000.0), "memory": (0.02, 4.0), "tile": (0.01, 2.0)},
        lambda parameters: {"grouped": {"fp32": ProductCurve(**parameters)}},
        device,
        kernels,
        measured,
    )


def fit_attention(device: DeviceSpec, kernels: Sequence[Attention], measured: Sequence[float]) -> Fit:
    """Fused attention in fp32, forward and backward."""
    peak = device.peak("fp32")

    def predict(parameters: Parameters) -> list[float]:
        curve = AttentionCurve(**parameters)
        return [attention_seconds(device, curve, kernel, peak) for kernel in kernels]

    bounds = {"rate": (0.01, 2.0), "backward": (0.1, 3.0), "launch_us": (0.5, 2000.0), "ramp": (0.1, 3000.0)}
    return fit("attention", bounds, predict, measured)


def fit_scan(device: DeviceSpec, kernels: Sequence[Scan], measured: Sequence[float]) -> Fit:
    """Mamba-2's scan, forward and backward."""
    return _fit_kernels(
        "scan",
        {"processor_tflops": (1e-4, 2.0), "memory": (0.01, 2.0), "launch_us": (1.0, 20000.0)},
        lambda parameters: {"scan": ScanCurve(**parameters)},
        device,
        [[kernel] for kernel in kernels],
        measured,
    )


def fit_stream(device: DeviceSpec, kernels: Sequence[Sequence[Kernel]], measured: Sequence[float]) -> Fit:
    """Norms, activations and additions, timed together."""
    return _fit_kernels(
        "stream",
        {"memory": (0.02, 4.0), "launch_us": (0.2, 500.0)},
        lambda parameters: {"stream": StreamCurve(**parameters)},
        device,
        kernels,
        measured,
    )


def with_curves(device: DeviceSpec, curves: dict[str, Any]) -> DeviceSpec:
    """``device`` with some of its curves replaced."""
    return device.model_copy(update={"curves": device.curves.model_copy(update=curves)})


def _fit_kernels(
    name: str,
    bounds: dict[str, tuple[float, float]],
    curves: Callable[[Parameters], dict[str, Any]],
    device: DeviceSpec,
    kernels: Sequence[Sequence[Kernel]],
    measured: Sequence[float],
) -> Fit:
    """Cases of one or more kernels each, in fp32."""

    def predict(parameters: Parameters) -> list[float]:
        described = with_curves(device, curves(parameters))
        return [sum(kernel_seconds(described, kernel, "fp32") for kernel in case) for case in kernels]

    return fit(name, bounds, predict, measured)


def fit_collective(
    device: DeviceSpec, operation: str, sizes: Sequence[float], measured: Sequence[float]
) -> Fit:
    """A collective of two ranks, ``sizes`` in bytes of the whole tensor (all-to-all: of what a rank holds).

    Two ranks do not say what a further one costs. A ring has one round more for it, so ``hop_us`` is taken
    to be what the smallest of two ranks takes.
    """

    def predict(parameters: Parameters) -> list[float]:
        curve = CollectiveCurve(**parameters, hop_us=parameters["base_us"])
        return [inside_seconds(device, curve, operation, size, 2) for size in sizes]

    bounds = {"base_us": (1.0, 5000.0), "share": (0.02, 4.0), "half_mb": (1e-3, 4.0)}
    found = fit(operation, bounds, predict, measured)
    return replace(found, parameters=found.parameters | {"hop_us": found.parameters["base_us"]})

"""A device and what connects it: published rates, and curves that say how much of them real work reaches."""

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from brigata.describe.errors import one_of
from brigata.describe.section import Section

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
"""Number formats of products."""


class ProductCurve(Section):
    """How fast a matrix product runs: whole tiles on whole rounds of processors, or the memory's bytes."""

    rate: float = Field(default=0.75, gt=0)
    """Share of the peak that a large product reaches."""
    launch_us: float = Field(default=4.0, ge=0)
    """Time of the smallest product (microseconds)."""
    memory: float = Field(default=0.8, gt=0)
    """Share of the memory bandwidth that a product bound by it reaches."""
    tile: float = Field(default=0.15, ge=0)
    """By which power of its arithmetic intensity a smaller tile is slower."""


class AttentionCurve(Section):
    """How fast fused attention runs."""

    rate: float = Field(default=0.5, gt=0)
    """Share of the peak of long sequences, forward; only pairs that are seen count."""
    backward: float = Field(default=0.8, gt=0)
    """The backward's share of that rate (Dao, arXiv 2307.08691, figures 5 and 6)."""
    launch_us: float = Field(default=6.0, ge=0)
    """Time of the smallest (microseconds)."""
    ramp: float = Field(default=500.0, ge=0)
    """Keys that a query must see for half of that rate (tokens)."""
    memory: float = Field(default=0.7, gt=0)
    """Share of the memory bandwidth when a cache is read (decoding)."""


class StreamCurve(Section):
    """Work bound by memory: norms, activations, additions, the optimizer."""

    memory: float = Field(default=0.8, gt=0)
    """Share of the memory bandwidth."""
    launch_us: float = Field(default=2.5, ge=0)
    """Time of the smallest kernel (microseconds)."""


class ScanCurve(Section):
    """Mamba-2's scan, whose small products are bound by each processor, not by its matrix units."""

    processor_tflops: float = Field(default=0.55, gt=0)
    """Operations of one processor (Tflop/s). The default was measured on a B200, and stands in for others."""
    memory: float = Field(default=0.5, gt=0)
    """Share of the memory bandwidth."""
    launch_us: float = Field(default=40.0, ge=0)
    """Time of the smallest (microseconds)."""


class CollectiveCurve(Section):
    """One kind of collective inside a node."""

    base_us: float = Field(default=8.0, ge=0)
    """Time of the smallest among two devices (microseconds)."""
    hop_us: float = Field(default=1.0, ge=0)
    """More for each further rank of a ring (microseconds)."""
    share: float = Field(default=0.75, gt=0)
    """Share of the link's bandwidth that large messages reach."""
    half_mb: float = Field(default=2.0, ge=0)
    """Message of which half that share is reached (MB); between, the loss falls with the root of the size."""


class Curves(Section):
    """Fitted shares; what is absent has the default of its kind."""

    product: dict[Precision, ProductCurve] = Field(default_factory=dict)
    attention: AttentionCurve = AttentionCurve()
    grouped: dict[Precision, ProductCurve] = Field(default_factory=dict)
    """Products of experts."""
    stream: StreamCurve = StreamCurve()
    scan: ScanCurve = ScanCurve()
    collective: dict[str, CollectiveCurve] = Field(default_factory=dict)
    network_share: float = Field(default=0.8, gt=0)
    """Share of the network's rate that large messages between nodes reach."""
    network_us: float = Field(default=15.0, ge=0)
    """Time of the smallest message between nodes (microseconds)."""
    sustained: float = Field(default=1.0, gt=0)
    """Speed of products in hours of training, as a share of that in a short measurement: the power limit."""


class DeviceSpec(Section):
    """One accelerator in its node. Rates are one direction, per device."""

    vendor: str
    peak_tflops: dict[Precision, float]
    """Dense products (Tflop/s) by precision."""
    memory_gb: float = Field(gt=0)
    """Memory (GB, 1e9 bytes)."""
    memory_gbs: float = Field(gt=0)
    """Memory bandwidth (GB/s)."""
    processors: int = Field(default=1, gt=0)
    """Processors that share out a product's tiles (SMs, compute units)."""
    power_w: float | None = Field(default=None, gt=0)
    """Power limit (W)."""
    node_devices: int = Field(default=8, gt=0)
    """Devices of a node."""
    domain_devices: int = Field(default=8, gt=0)
    """Devices that the fast links connect."""
    link_gbs: float = Field(gt=0)
    """Fast links, all together (GB/s)."""
    topology: Literal["switch", "mesh", "torus", "bus"] = "switch"
    """How they connect: any pair at the full rate, a link a pair, neighbours only, or over the host."""
    multicast: bool = False
    """The switch adds up all-reduces of five devices and more itself (NVLS)."""
    network_gbs: float = Field(gt=0)
    """Network between nodes (GB/s a device)."""
    host_gbs: float = Field(default=16.0, gt=0)
    """To the host's memory (GB/s)."""
    source: str
    """Where these are published."""
    note: str = ""
    """What is uncertain."""
    fitted: str = ""
    """What the curves were fitted on; empty: on nothing, they are defaults."""
    curves: Curves = Curves()

    def peak(self, precision: str) -> float:
        """Operations per second at best; of a precision that the device lacks, of the next wider one."""
        wider = {"fp4": "fp8", "fp8": "bf16", "bf16": "fp16", "fp16": "tf32", "tf32": "fp32", "fp64": "fp32"}
        while precision not in self.peak_tflops:
            precision = wider[precision]
        return self.peak_tflops[precision] * 1e12

    def curve(self, precision: str, grouped: bool = False) -> ProductCurve:
        """The curve of products of ``precision``, or the nearest that was fitted."""
        nearest = {
            "fp4": "fp8",
            "fp8": "bf16",
            "fp16": "bf16",
            "tf32": "bf16",
            "fp32": "bf16",
            "fp64": "bf16",
        }
        curves = (self.curves.grouped if grouped else {}) or self.curves.product
        while precision not in curves and precision in nearest:
            precision = nearest[precision]
        return curves.get(precision, ProductCurve())  # type: ignore[call-overload, no-any-return]


FOLDER = resources.files("brigata.describe.devices")


@cache
def device_names() -> tuple[str, ...]:
    """Names of the described devices."""
    return tuple(sorted(file.name[:-5] for file in FOLDER.iterdir() if file.name.endswith(".toml")))


def read_device(path: Path) -> DeviceSpec:
    """A device that a file describes, as ``brigata calibrate`` writes it.

    Raises:
        ValueError: the file is not there or describes none; one sentence with a way out.
    """
    try:
        return DeviceSpec.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ValueError(f"cluster.file = {str(path)!r}: {reason}; `brigata calibrate` writes one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"cluster.file = {str(path)!r} is not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"cluster.file = {str(path)!r}: {key}: {first['msg'].lower()}; "
            "`brigata calibrate` writes a whole one"
        ) from None


@cache
def load_device(name: str) -> DeviceSpec:
    """A described device.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in device_names():
        raise ValueError(f"device {name!r} is not known; use {one_of(device_names())}")
    return DeviceSpec.model_validate(tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8")))

"""Seconds that a device needs for a kernel: the larger of its operations and its bytes, at fitted shares.

A product is cut into tiles, the tiles go to the processors in rounds, and the last round may leave processors
idle (wave quantisation); few tiles are cut along k as well (split-k). The tile that is fastest counts, as a
library would choose it. Source of the model: NVIDIA, "Matrix Multiplication Background", wave quantisation.
"""

from brigata.cost.kernels import Attention, Elementwise, Grouped, Kernel, Product, Scan
from brigata.describe.device import AttentionCurve, DeviceSpec, ProductCurve

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of a tile."""
SPLITS = (1, 2, 4, 8)
"""Parts of k."""
ALIGNED, UNALIGNED = 8, 0.3
"""Elements of which rows must be a multiple (16 bytes), and the rate of others: NVIDIA, "Matrix
Multiplication Background", tensor core requirements; the rate is that of tables with 50,257 tokens."""
SHARPNESS = 4.0
"""How suddenly a product turns from compute-bound to memory-bound: exponent of a p-norm."""
PRECISIONS: dict[float, str] = {8: "fp64", 4: "fp32", 2: "bf16", 1: "fp8"}
"""Precision of an itemsize, where none is named."""


def product_seconds(
    device: DeviceSpec,
    curve: ProductCurve,
    shape: tuple[int, int, int],
    count: int,
    moved: float,
    peak: float,
) -> float:
    """``count`` products (m, n, k) that move ``moved`` bytes, at ``peak`` operations a second."""
    m, n, k = shape
    processors = device.processors
    if n % ALIGNED or k % ALIGNED:
        peak *= UNALIGNED
    best = float("inf")
    for rows, columns in TILES:
        tiles = count * -(-m // rows) * -(-n // columns)
        slower = (rows * columns / (rows + columns) / (256 * 128 / 384)) ** curve.tile
        one = 2.0 * rows * columns * k * processors / (peak * curve.rate * slower)
        for split in SPLITS:
            rounds = -(-tiles * split // processors)
            seconds = rounds * one / split
            if split > 1:
                seconds += 8.0 * split * m * n * count / (device.memory_gbs * 1e9)
            best = min(best, seconds)
            if tiles * split >= processors:
                break
    memory = moved / (device.memory_gbs * 1e9 * curve.memory)
    return float(curve.launch_us * 1e-6 + (best**SHARPNESS + memory**SHARPNESS) ** (1 / SHARPNESS))


def quantise_seconds(device: DeviceSpec, precision: str, elements: float) -> float:
    """Reading 16-bit elements and writing them in 8 or 4 bits, before a product of these."""
    if precision not in ("fp8", "fp4"):
        return 0.0
    return 3.0 * elements / (device.memory_gbs * 1e9 * device.curves.stream.memory)


def attention_seconds(device: DeviceSpec, curve: AttentionCurve, core: Attention, peak: float) -> float:
    """Fused attention: rounds of query blocks, slower for few keys; a cache's bytes where queries are few."""
    rows = 128 if core.queries >= 128 else max(core.queries, 1)
    blocks = core.sequences * core.heads * -(-core.queries // rows)
    rounds = -(-blocks // device.processors) * device.processors / blocks
    seen = core.pairs / core.queries
    rate = curve.rate * (curve.backward if core.backward else 1.0) * seen / (seen + curve.ramp)
    idle = rounds if blocks < 4 * device.processors else 1.0
    operations = core.flops * idle / (peak * rate)
    memory = core.bytes / (device.memory_gbs * 1e9 * curve.memory)
    return float(curve.launch_us * 1e-6 + max(operations, memory))


def kernel_seconds(device: DeviceSpec, kernel: Kernel, precision: str | None = None) -> float:
    """Seconds of one kernel.

    Args:
        device: which runs it.
        kernel: what.
        precision: of the products; default: what the itemsize says. Attention in fp8 or fp4 runs in bf16.
    """
    match kernel:
        case Product():
            chosen = precision or PRECISIONS[kernel.itemsize]
            peak = device.peak(chosen) * device.curves.sustained
            curve, shape = device.curve(chosen), (kernel.m, kernel.n, kernel.k)
            seconds = product_seconds(device, curve, shape, kernel.count, kernel.bytes, peak)
            return seconds + quantise_seconds(device, chosen, kernel.m * kernel.k * kernel.count)
        case Grouped():
            chosen = precision or PRECISIONS[kernel.itemsize]
            peak = device.peak(chosen) * device.curves.sustained
            curve = device.curve(chosen, grouped=True)
            filled = max(round(kernel.reached), 1)
            shape = (-(-kernel.rows // filled), kernel.n, kernel.k)
            return product_seconds(device, curve, shape, filled, kernel.bytes, peak)
        case Attention():
            wide = "bf16" if precision in ("fp8", "fp4") else precision or PRECISIONS[kernel.itemsize]
            peak = device.peak(wide)  # softmax between the products leaves room below the power limit
            return attention_seconds(device, device.curves.attention, kernel, peak)
        case Scan():
            scan = device.curves.scan
            peak = min(scan.processor_tflops * 1e12 * device.processors, device.peak("bf16"))
            memory = kernel.bytes / (device.memory_gbs * 1e9 * scan.memory)
            return scan.launch_us * 1e-6 + max(kernel.flops / peak, memory)
        case Elementwise():
            stream = device.curves.stream
            return stream.launch_us * 1e-6 + kernel.bytes / (device.memory_gbs * 1e9 * stream.memory)

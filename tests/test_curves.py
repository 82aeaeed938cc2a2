"""Device presets and their curves: complete, physical, and near what was published and not fitted on."""

import pytest

from brigata.cost.collectives import collective_seconds, wire_bytes
from brigata.cost.curves import kernel_seconds, quantise_seconds
from brigata.cost.kernels import Attention, Elementwise, Grouped, Product, Scan
from brigata.cost.messages import Message
from brigata.describe.device import DeviceSpec, device_names, load_device
from brigata.describe.software import load_software, software_names

FITTED_DEVICES = [name for name in device_names() if "micro" in load_device(name).fitted]


@pytest.mark.parametrize("name", device_names())
def test_a_device_is_whole_and_its_curves_are_shares(name: str) -> None:
    device = load_device(name)
    assert device.source and device.peak("bf16") > 0
    for curve in [*device.curves.product.values(), *device.curves.grouped.values()]:
        assert 0.1 < curve.rate <= 1.0 and curve.memory <= 1.2
    assert 0.5 <= device.curves.sustained <= 1.05
    large = Product(8192, 8192, 8192)
    assert kernel_seconds(device, large, "bf16") >= large.flops / device.peak("bf16")
    norm = Elementwise("norm", 1e9)
    assert kernel_seconds(device, norm) >= norm.bytes / (device.memory_gbs * 1e9)


def test_presets_cover_the_published_devices() -> None:
    assert len(device_names()) >= 25 and "cpu" in device_names()
    assert {
        "a100-sxm4-80gb",
        "h100-sxm5-80gb",
        "gb200-nvl72",
        "mi300x-192gb",
        "ascend-910b-64gb",
        "tpu-v5p",
    } <= set(device_names())


@pytest.mark.parametrize("name", FITTED_DEVICES)
def test_more_work_takes_longer(name: str) -> None:
    device = load_device(name)
    for small, large in [
        (Product(1024, 4096, 4096), Product(8192, 4096, 4096)),
        (Grouped(2048, 4096, 2048, 8), Grouped(16384, 4096, 2048, 8)),
        (Attention(1, 2048, 2048, 32, 8, 128), Attention(1, 8192, 8192, 32, 8, 128)),
        (Scan(2048, 64, 64, 128, 8, 128), Scan(16384, 64, 64, 128, 8, 128)),
    ]:
        assert kernel_seconds(device, small, "bf16") < kernel_seconds(device, large, "bf16")
    core = Attention(1, 4096, 4096, 32, 8, 128)
    backward = Attention(1, 4096, 4096, 32, 8, 128, backward=True)
    assert kernel_seconds(device, backward) > 2 * kernel_seconds(device, core)


@pytest.mark.parametrize(
    ("device", "shape", "tflops"),
    [
        # best products of the table of achievable rates, other software than the curves were fitted on
        # (stas00/ml-engineering, compute/accelerator, maximum achievable matmul)
        ("a100-sxm4-80gb", (1024, 10240, 5120), 271.2),
        ("h100-sxm5-80gb", (2048, 2048, 13312), 794.5),
        ("b200-sxm-180gb", (1792, 16128, 3072), 1745.0),
        ("gb200-nvl72", (4096, 9728, 2048), 1822.0),
    ],
)
def test_best_published_products_are_predicted(
    device: str, shape: tuple[int, int, int], tflops: float
) -> None:
    spec = load_device(device)
    unthrottled = spec.model_copy(update={"curves": spec.curves.model_copy(update={"sustained": 1.0})})
    product = Product(*shape)
    predicted = product.flops / kernel_seconds(unthrottled, product, "bf16") / 1e12
    assert predicted == pytest.approx(tflops, rel=0.2)


def test_rows_that_are_no_multiple_of_16_bytes_are_slow() -> None:
    device = load_device("a100-sxm4-80gb")
    odd, even = (kernel_seconds(device, Product(2048, n, 4096), "fp16") for n in (50257, 50304))
    assert odd > 2 * even


def test_eight_bits_are_faster_and_cost_a_cast() -> None:
    device = load_device("h100-sxm5-80gb")
    product = Product(8192, 8192, 8192)
    assert kernel_seconds(device, product, "fp8") < 0.7 * kernel_seconds(device, product, "bf16")
    assert quantise_seconds(device, "fp8", 1e9) > 0 == quantise_seconds(device, "bf16", 1e9)


def test_a_precision_that_is_missing_is_the_next_wider_one() -> None:
    device = load_device("a100-sxm4-80gb")
    assert device.peak("fp8") == device.peak("bf16") == 312e12
    assert load_device("v100-sxm2-32gb").peak("bf16") == 125e12


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("ranks", [2, 5, 16])
def test_wire_bytes_are_those_of_the_messages(operation: str, ranks: int) -> None:
    message = Message(operation, "dp", 1e6, ranks, "test")  # type: ignore[arg-type]
    size = 1e6 / ranks if operation == "all_to_all" else 1e6
    assert wire_bytes(operation, size, ranks) == pytest.approx(message.sent)


def test_an_all_reduce_sends_what_a_reduce_scatter_and_an_all_gather_send() -> None:
    both = wire_bytes("reduce_scatter", 8e6, 8) + wire_bytes("all_gather", 8e6, 8)
    assert wire_bytes("all_reduce", 8e6, 8) == both


def seconds_of(device: DeviceSpec, operation: str, size: float, ranks: int, near: int) -> float:
    return collective_seconds(device, Message(operation, "dp", size, ranks, "test"), near)  # type: ignore[arg-type]


def test_collectives_cross_nodes_at_the_rate_of_their_adapters() -> None:
    device = load_device("a100-sxm4-80gb")
    size = 4e9
    inside = seconds_of(device, "all_reduce", size, 8, 8)
    one_rank_a_node = seconds_of(device, "all_reduce", size, 8, 1)
    all_ranks = seconds_of(device, "all_reduce", size, 16, 8)
    network = device.network_gbs * 1e9 * device.curves.network_share
    assert one_rank_a_node >= wire_bytes("all_reduce", size, 8) / network > inside
    assert inside < all_ranks < one_rank_a_node  # eight adapters a node carry it
    assert seconds_of(device, "all_reduce", size, 1, 1) == 0.0


def test_published_all_reduces_are_predicted() -> None:
    """Two A100 nodes with 400 Gb/s each, 2 GiB: 51.4 ms (nccl-tests on p4de, stas00/ml-engineering)."""
    device = load_device("a100-sxm4-80gb")
    message = Message("all_reduce", "dp", 2.0**31, 16, "test")
    assert collective_seconds(device, message, 8, network_gbs=6.25) == pytest.approx(51.4e-3, rel=0.6)
    h100 = load_device("h100-sxm5-80gb")
    message = Message("all_reduce", "dp", 2.0**33, 16, "test")  # 33.6 ms
    assert collective_seconds(h100, message, 8) == pytest.approx(33.6e-3, rel=0.6)


@pytest.mark.parametrize("name", software_names())
def test_a_generation_of_software_has_at_most_four_fitted_parameters(name: str) -> None:
    spec = load_software(name)
    assert spec.title and len(spec.free) <= 4 and set(spec.free) <= spec.model_fields_set
    assert bool(spec.free) == bool(spec.fitted)

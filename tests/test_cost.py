"""Costs are counted on the real model: operations by torch's counter, causal pairs by a mask."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from brigata.cost.kernels import Attention, Grouped, Kernel, Product, Scan
from brigata.cost.units import Share, flops, head_forward, unit_backward, unit_forward
from brigata.describe import ModelSpec
from brigata.model.initial import initial_value
from brigata.model.sequences import Sequences
from brigata.model.unit import Unit
from test_families import FAMILIES

SEQUENCES, LENGTH = 2, 64


def spec_of(family: str) -> ModelSpec:
    data: dict[str, Any] = {"hidden": 32, "heads": 8, "kv_heads": 4, "ffn": 48} | FAMILIES[family]
    if data.get("positions") == "learned":
        data["max_positions"] = LENGTH
    return ModelSpec.model_validate(data)


def counted(spec: ModelSpec, number: int) -> tuple[float, float]:
    """Operations of one unit, forward and backward, as torch counts them with attention in plain products."""
    unit = Unit(number, spec)
    with torch.no_grad():
        for name, tensor in [*unit.named_parameters(), *unit.named_buffers()]:
            tensor.copy_(initial_value(name, tensor.shape, spec, 0, tensor.dtype))
    x = torch.randn(SEQUENCES * LENGTH, spec.hidden, requires_grad=True)
    sequences = Sequences(SEQUENCES, LENGTH, torch.arange(LENGTH))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        y = unit(x, sequences)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def unmasked(kernels: list[Kernel]) -> float:
    """Operations of products, and of attention in plain ones: 2 forward, 4 backward, none masked."""
    total = flops([kernel for kernel in kernels if isinstance(kernel, Product | Grouped | Scan)])
    for core in (kernel for kernel in kernels if isinstance(kernel, Attention)):
        scores = core.sequences * core.queries * core.keys
        total += 2.0 * (4 if core.backward else 2) * scores * core.heads * core.head_dim
    return total


UNITS = [
    (family, number)
    for family in FAMILIES
    for number in {letter: i for i, letter in enumerate(spec_of(family).pattern)}.values()
]


@pytest.mark.parametrize(("family", "number"), UNITS)
def test_operations_of_a_unit_are_those_of_the_real_one(family: str, number: int) -> None:
    spec = spec_of(family)
    letter = spec.pattern[number]
    if letter == "w" or (letter == "*" and spec.attention_softcap):
        pytest.skip("masked and capped attention run as several products, which torch counts otherwise")
    share = Share(SEQUENCES, LENGTH, LENGTH, chunk=32)
    forward, backward = counted(spec, number)
    assert unmasked(unit_forward(spec, letter, share)) == pytest.approx(forward)
    assert unmasked(unit_backward(spec, letter, share)) == pytest.approx(backward)


@pytest.mark.parametrize(
    ("queries", "keys", "window"), [(7, 7, None), (5, 12, None), (9, 9, 4), (4, 10, 6), (1, 8, 3), (6, 6, 9)]
)
def test_pairs_are_those_of_the_mask(queries: int, keys: int, window: int | None) -> None:
    i = torch.arange(keys - queries, keys)[:, None]
    j = torch.arange(keys)[None]
    seen = (j <= i) & ((i - j) < (window or keys))
    assert Attention(1, queries, keys, 1, 1, 1, window).pairs == int(seen.sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_shares_add_up(family: str) -> None:
    """Everything but replicated key/value heads, groups and routers is shared out evenly."""
    spec = spec_of(family)
    whole, half = Share(SEQUENCES, LENGTH, LENGTH), Share(SEQUENCES, LENGTH, LENGTH, tp=2)
    for letter in set(spec.pattern) - {"E"}:
        parts = flops(unit_forward(spec, letter, half))
        assert 2 * parts == pytest.approx(flops(unit_forward(spec, letter, whole)))
    assert 2 * flops(head_forward(spec, half)) == pytest.approx(flops(head_forward(spec, whole)))


def test_frozen_weights_have_no_gradient_product() -> None:
    spec = spec_of("qwen")
    share = Share(SEQUENCES, LENGTH, LENGTH)
    products = [k for k in unit_backward(spec, "-", share, weights=False) if isinstance(k, Product)]
    assert flops(list(products)) == flops(
        [k for k in unit_forward(spec, "-", share) if isinstance(k, Product)]
    )

"""The equivalence matrix: every layout equals one process, in fp64 to 1e-10."""

from typing import Any

import pytest
import torch

from equivalence import job, train_steps
from pool import Pool

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-regather": {"tp": 2, "keep_gathered": False},
    "tp2-ring": {"tp": 2, "overlap": "ring:2"},
    "tp4": {"tp": 4},
    "tp2-auto": {"tp": 2, "overlap": "auto"},
    "tp2-dp2-auto": {"tp": 2, "dp": 2, "overlap": "auto", "keep_gathered": False},
    "tp4-ring": {"tp": 4, "overlap": "ring"},
    "tp4-sliced": {"tp": 4, "overlap": "sliced:2"},
    "tp2-blocking": {"tp": 2, "overlap": "blocking"},
    "dp2-zero1": {"dp": 2, "zero": 1},
    "dp4-zero3": {"dp": 4, "zero": 3},
    "dp2-zero2-fsdp2": {"dp": 2, "zero": 2, "zero_engine": "fsdp2"},
    "dp2-zero3-fsdp2": {"dp": 2, "zero": 3, "zero_engine": "fsdp2"},
    "tp2-dp2-zero3-fsdp2": {"tp": 2, "dp": 2, "zero": 3, "zero_engine": "fsdp2"},
    "tp2-dp2-zero1": {"tp": 2, "dp": 2, "zero": 1},
    "dp2-zero2": {"dp": 2, "zero": 2},
    "dp2-zero3": {"dp": 2, "zero": 3},
    "tp2-dp2-zero2": {"tp": 2, "dp": 2, "zero": 2},
    "tp2-dp2-zero3": {"tp": 2, "dp": 2, "zero": 3, "overlap": "ring"},
    "dp2x2-zero1": {"dp": 4, "dp_replicate": 2, "zero": 1},
    "dp2x2-zero2": {"dp": 4, "dp_replicate": 2, "zero": 2},
    "dp2x2-zero3": {"dp": 4, "dp_replicate": 2, "zero": 3},
    "dp4x1-zero2": {"dp": 4, "dp_replicate": 4, "zero": 2},
    "tp2-dp2x1-zero2": {"tp": 2, "dp": 2, "dp_replicate": 2, "zero": 2},
    "tp2-dp2x1-zero3": {"tp": 2, "dp": 2, "dp_replicate": 2, "zero": 3},
    "dp2x2-zero3-fsdp2": {"dp": 4, "dp_replicate": 2, "zero": 3, "zero_engine": "fsdp2"},
    "tp2-dp2x1-zero2-fsdp2": {"tp": 2, "dp": 2, "dp_replicate": 2, "zero": 2, "zero_engine": "fsdp2"},
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def reference(pool: Pool, tied: bool) -> dict[str, Any]:
    return pool.run(1, train_steps, job({}, model__tie_embeddings=tied))[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(pool: Pool, reference: dict[str, Any], tied: bool, name: str) -> None:
    request = job(LAYOUTS[name], model__tie_embeddings=tied)
    for result in pool.run(request.ranks, train_steps, request):
        torch.testing.assert_close(result["losses"], reference["losses"], rtol=1e-10, atol=0)
        torch.testing.assert_close(result["norms"], reference["norms"], rtol=1e-10, atol=0)
        for kind in ("gradients", "parameters"):
            assert result[kind].keys() == reference[kind].keys()
            for parameter, whole in reference[kind].items():
                error = (result[kind][parameter] - whole).norm() / whole.norm()
                assert error < 1e-10, f"{kind} of {parameter}: relative error {error:.1e}"


@pytest.mark.parametrize("name", ["tp4-ring", "tp2-dp2-zero3"])
def test_two_runs_are_bitwise_equal_whatever_the_delays(pool: Pool, name: str) -> None:
    request = job(LAYOUTS[name])
    calm, hectic = (pool.run(request.ranks, train_steps, request, delays)[0] for delays in (False, True))
    for parameter, value in calm["parameters"].items():
        assert torch.equal(value, hectic["parameters"][parameter]), parameter
    assert torch.equal(torch.stack(calm["losses"]), torch.stack(hectic["losses"]))


@pytest.mark.parametrize("name", ["tp2", "tp4-ring", "dp2-zero3", "tp2-dp2-zero2"])
def test_bf16_products_with_fp32_masters_stay_near_one_process(pool: Pool, name: str) -> None:
    """bf16 keeps 8 bits: after three steps losses agree to 1 %, masters and gradients stay fp32."""
    reference = pool.run(1, train_steps, job({}, train__precision="bf16"))[0]
    request = job(LAYOUTS[name], train__precision="bf16")
    for result in pool.run(request.ranks, train_steps, request):
        torch.testing.assert_close(result["losses"], reference["losses"], rtol=1e-2, atol=0)
        for kind in ("gradients", "parameters"):
            assert {value.dtype for value in result[kind].values()} == {torch.float32}
        for parameter, whole in reference["gradients"].items():
            error = (result["gradients"][parameter] - whole).norm() / whole.norm()
            assert error < 0.05, f"{parameter}: relative error {error:.1e}"

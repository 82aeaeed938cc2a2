"""Memory of a rank: states by formula, published peaks, and whether it fits."""

from typing import Any

import pytest

from brigata.describe.parameters import count_parameters
from brigata.simulate.arrangement import Arrangement
from brigata.simulate.iteration import schedule_of
from brigata.simulate.memory import MemoryUse, memory_of
from test_iteration import MODEL, job

GPT = {
    "pattern": "(*-)22",
    "hidden": 2304,
    "heads": 24,
    "ffn": 9216,
    "vocab": 51200,
    "mlp": "gelu_tanh",
    "norm": "layernorm",
    "positions": "learned",
    "max_positions": 1024,
    "tie_embeddings": True,
}


def uses(layout: dict[str, Any], model: dict[str, Any] | None = None, **changes: Any) -> list[MemoryUse]:
    request = job(layout, model, **changes)
    return memory_of(Arrangement.of(request), schedule_of(request))


@pytest.mark.parametrize(
    ("zero", "bytes_a_parameter"),
    # arXiv 1910.02054: 16 bytes, 4 + 12 / n, 2 + 14 / n, 16 / n, for n ranks
    [(0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)],
)
def test_states_are_those_of_zero(zero: int, bytes_a_parameter: float) -> None:
    use = uses({"dp": 8, "zero": zero})[0]
    parameters = count_parameters(job({}).model)
    states = sum(use.by_kind[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert states == pytest.approx(bytes_a_parameter * parameters, rel=1e-3)


def test_recomputing_offloading_and_freezing_save_memory() -> None:
    plain = uses({"dp": 8})[0]
    assert uses({"dp": 8, "recompute": "full"})[0].by_kind["activations"] < 0.1 * plain.by_kind["activations"]
    assert uses({"dp": 8, "offload": "optimizer"})[0].by_kind["optimizer"] == 0
    assert uses({"dp": 8, "offload": "activations"})[0].total <= plain.total
    frozen = uses({"dp": 8}, train__trained="lora")[0]
    assert frozen.by_kind["gradients"] == frozen.by_kind["optimizer"] == 0
    half = uses({"dp": 8, "recompute": "full", "recompute_layers": 16})[0]
    assert half.by_kind["activations"] == pytest.approx(plain.by_kind["activations"] / 2, rel=0.1)


def test_the_first_rank_of_a_pipeline_holds_most_activations() -> None:
    by_rank = [use.by_kind["activations"] for use in uses({"pp": 4})]
    assert by_rank == sorted(by_rank, reverse=True)
    assert by_rank[0] == pytest.approx(4 * by_rank[-1])


def test_more_ranks_never_hold_more() -> None:
    assert uses({"tp": 8})[0].total < uses({"tp": 4})[0].total < uses({})[0].total
    assert uses({"cp": 4})[0].total < uses({})[0].total


@pytest.mark.parametrize(
    ("schedule", "stages", "published_gb"),
    # Qi et al., arXiv 2401.10241, table 4: 1.5 B parameters, 8 ranks, 6 sequences a micro-batch
    [("1f1b", 1, 30), ("interleaved", 3, 40), ("zb-h1", 1, 32), ("zb-h2", 1, 59)],
)
def test_published_peaks_of_pipelines(schedule: str, stages: int, published_gb: float) -> None:
    layout = {"pp": 8, "schedule": schedule, "virtual_stages": stages, "zero": 0}
    found = uses(
        layout,
        GPT,
        workload__seq_len=1024,
        workload__micro_batch=6,
        workload__global_batch=144,
        cluster__preset="a100-sxm4-80gb",
        cluster__software="megatron-2021",
    )
    assert max(use.allocated for use in found) / 1e9 == pytest.approx(published_gb, rel=0.08)


def test_the_probability_of_too_little_memory() -> None:
    use = uses({"dp": 8})[0]
    assert use.too_large_probability(use.total) == pytest.approx(0.5)
    assert use.too_large_probability(2 * use.total) < 1e-6
    assert use.too_large_probability(0.5 * use.total) > 1 - 1e-6
    assert use.allocated == use.total - use.by_kind["context"] - use.by_kind["fragmentation"]


def test_logits_of_a_large_vocabulary_set_the_peak() -> None:
    small = MODEL | {"pattern": "(*-)2", "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1024}
    assert uses({}, small)[0].moment == "the loss of a micro-batch"
    assert uses({}, small | {"vocab": 256})[0].moment == "the first backward of a unit"

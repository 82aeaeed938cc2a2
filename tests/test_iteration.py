"""A simulated step: what it is made of, and what must follow from what."""

from typing import Any

import pytest

from brigata.cost.data_parallel import (
    Widths,
    backward_messages,
    forward_messages,
    model_shards,
    step_messages,
)
from brigata.cost.messages import sent_bytes
from brigata.cost.units import Share
from brigata.describe.job import Job, parse_job
from brigata.describe.parameters import count_parameters
from brigata.simulate.arrangement import Arrangement, even_counts, split_layers
from brigata.simulate.iteration import Iteration, simulate_iteration
from brigata.simulate.prediction import predict
from brigata.simulate.synchronisation import held_by_stage

MODEL = {"pattern": "(*-)32", "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}


def job(layout: dict[str, Any], model: dict[str, Any] | None = None, **changes: Any) -> Job:
    """Llama 3 8B on H100s under Megatron-Core, unless changed (``section__key``)."""
    data: dict[str, Any] = {
        "version": 1,
        "model": model or MODEL,
        "cluster": {"preset": "h100-sxm5-80gb", "software": "megatron-2024"},
        "workload": {"seq_len": 8192, "global_batch": 64, "micro_batch": 1},
        "layout": {"zero": 1, "dp": 1} | layout,
        "train": {"precision": "bf16"},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        data[section][key] = value
    return parse_job(data, run=False)


def seconds(layout: dict[str, Any], **changes: Any) -> float:
    return simulate_iteration(job(layout, **changes)).seconds


LAYOUTS = [
    {},
    {"tp": 8},
    {"tp": 4, "dp": 8},
    {"tp": 2, "cp": 2, "dp": 2},
    {"tp": 2, "cp": 2, "dp": 2, "cp_method": "ulysses"},
    {"tp": 2, "pp": 4},
    {"tp": 2, "pp": 4, "virtual_stages": 4, "dp": 2},
    {"pp": 4, "schedule": "zb-h1"},
    {"pp": 4, "schedule": "zb-h2"},
    {"pp": 4, "schedule": "zb-v"},
    {"pp": 4, "schedule": "dualpipe-v"},
    {"pp": 4, "schedule": "gpipe"},
    {"dp": 64, "zero": 3},
    {"dp": 64, "zero": 2},
    {"dp": 64, "zero": 3, "dp_replicate": 8},
    {"dp": 8, "zero": 0},
    {"tp": 4, "recompute": "full"},
    {"tp": 4, "recompute": "selective"},
    {"pp": 4, "recompute": "full", "recompute_layers": 2},
    {"dp": 8, "offload": "optimizer"},
    {"tp": 2, "pp": 2, "offload": "activations"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_breakdown_adds_up_to_the_step(layout: dict[str, Any]) -> None:
    found = simulate_iteration(job(layout))
    assert sum(found.breakdown.values()) == pytest.approx(found.seconds)
    assert all(part >= -1e-9 for part in found.breakdown.values()), found.breakdown


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_device_is_faster_than_its_peak(layout: dict[str, Any]) -> None:
    found = predict(job(layout))
    assert 0.05 < found.mfu < 0.8
    assert (
        found.hfu >= found.mfu * 0.95
    )  # ours counts masked pairs of attention's backward as FlashAttention does


def test_operations_are_6_a_parameter_and_token_and_attention() -> None:
    found = predict(job({}))
    tokens, table = found.job.tokens_per_step, MODEL["vocab"] * MODEL["hidden"]
    dense = 6.0 * (count_parameters(found.job.model) - table) * tokens
    attention = 3 * 2 * 2 * 32 * 4096 * (8192 + 1) / 2 * tokens
    assert found.model_flops == pytest.approx(dense + attention, rel=1e-3)


def test_ranks_share_the_work_out() -> None:
    assert seconds({}) / 8 < seconds({"tp": 8}) < seconds({}) / 4
    assert seconds({}) / 8 < seconds({"dp": 8}) < seconds({}) / 6
    assert seconds({}) / 8 < seconds({"cp": 8}) < seconds({}) / 4


def test_recomputing_everything_adds_a_forward() -> None:
    plain, again = (simulate_iteration(job({"recompute": how})) for how in ("none", "full"))
    units = again.stages[0].forward.total - 0.0
    share = again.breakdown["recompute"] / (64 * units)
    assert 0.85 < share < 1.0  # embedding, head and loss are not computed again
    assert again.seconds == pytest.approx(plain.seconds + again.breakdown["recompute"], rel=1e-6)
    half = simulate_iteration(job({"recompute": "full", "recompute_layers": 16}))
    assert half.breakdown["recompute"] == pytest.approx(again.breakdown["recompute"] / 2)


def test_schedules_have_the_bubbles_that_they_are_known_for() -> None:
    model = MODEL | {"vocab": 256, "pattern": "(*-)32"}

    def bubble(schedule: str, **more: Any) -> float:
        layout = {"pp": 8, "schedule": schedule} | more
        found = simulate_iteration(job(layout, model, workload__global_batch=32))
        return found.breakdown["bubble"] / found.seconds

    classic = bubble("1f1b")
    assert classic == pytest.approx(7 / (32 + 7), rel=0.1)
    assert bubble("gpipe") == pytest.approx(classic, rel=0.1)
    assert bubble("interleaved", virtual_stages=4) == pytest.approx(7 / (4 * 32 + 7), rel=0.4)
    assert bubble("zb-h1") < 0.6 * classic
    assert bubble("zb-h2") < bubble("zb-h1")


def test_stages_count_embedding_and_head_for_a_layer_where_layers_do_not_divide() -> None:
    assert even_counts(32, 8) == [4] * 8
    assert even_counts(126, 16) == [7, *[8] * 14, 7]
    assert even_counts(70, 12) == [5, *[6] * 10, 5]
    assert even_counts(31, 8) == [*[4] * 7, 3]
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            assert sum(even_counts(layers, stages)) == layers
            assert min(even_counts(layers, stages)) >= 0
    assert split_layers("*-*E") == ["*-", "*E"]
    assert split_layers("M*-ME") == ["M", "*-", "ME"]
    assert "".join(Arrangement.of(job({"pp": 4})).stages) == "*-" * 32


@pytest.mark.parametrize("layout", [{}, {"tp": 4}, {"pp": 4}, {"pp": 2, "virtual_stages": 2}], ids=str)
def test_ranks_hold_every_parameter_once(layout: dict[str, Any]) -> None:
    arrangement = Arrangement.of(job(layout))
    held = sum(rank.total for rank in held_by_stage(arrangement)) * arrangement.job.layout.tp
    assert held == pytest.approx(count_parameters(arrangement.job.model), rel=1e-5)


def test_groups_lie_in_one_node_as_far_as_they_fit() -> None:
    arrangement = Arrangement.of(job({"tp": 4, "dp": 16}))
    assert arrangement.per_domain(arrangement.stride["tp"], 4) == 4
    assert arrangement.per_domain(arrangement.stride["dp"], 16) == 2
    wide = Arrangement.of(job({"tp": 4, "dp": 16}, cluster__preset="gb200-nvl72"))
    assert wide.per_domain(wide.stride["dp"], 16) == 16
    assert not Arrangement.of(job({"pp": 4})).boundary_crosses(0)
    assert Arrangement.of(job({"tp": 8, "pp": 4})).boundary_crosses(0)


def test_a_slower_network_takes_longer() -> None:
    layout = {"tp": 8, "pp": 2, "dp": 8}
    fast, slow = seconds(layout), seconds(layout, cluster__network_gbs=2.0)
    assert fast < slow
    assert slow < seconds(layout, cluster__network_gbs=2.0, cluster__oversubscription=4.0)


def test_frozen_weights_have_no_gradient_and_no_optimizer() -> None:
    whole, adapters = (simulate_iteration(job({"dp": 8}, train__trained=what)) for what in ("all", "lora"))
    assert adapters.breakdown["optimizer"] == 0.0 < whole.breakdown["optimizer"]
    assert 0.6 < adapters.seconds / whole.seconds < 0.8
    assert adapters.breakdown["exposed dp"] == 0.0 < whole.breakdown["exposed dp"]


def test_activations_in_the_hosts_memory_cost_time_where_the_link_is_slow() -> None:
    kept, moved = (simulate_iteration(job({"tp": 2, "offload": what})) for what in ("none", "activations"))
    assert moved.seconds == pytest.approx(kept.seconds + moved.breakdown["exposed offload"])
    assert moved.breakdown["exposed offload"] > 0


def test_fewer_bits_are_faster() -> None:
    assert seconds({"tp": 4}, train__precision="fp8") < 0.85 * seconds({"tp": 4})


def test_the_cost_of_simulating_does_not_grow_with_replicas() -> None:
    from time import perf_counter

    def best(dp: int) -> float:
        request = job(
            {"tp": 8, "pp": 16, "virtual_stages": 2, "dp": dp},
            {"preset": "llama3.1-405b"},
            workload__global_batch=128 * dp,
        )
        times = []
        for _ in range(5):
            start = perf_counter()
            simulate_iteration(request)
            times.append(perf_counter() - start)
        return min(times)

    few, many = best(8), best(782)  # 1,024 and 100,096 devices
    assert many < 2 * few + 0.005


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallel_traffic_is_that_of_the_formula(zero: int) -> None:
    """Elements sent a rank and step, W parameters, m micro-batches, n ranks: arXiv 1910.02054, section 7."""
    spec = job({}).model
    n, m = 4, 3
    shards = list(model_shards(spec, Share(1, 64, 64), n, n))
    whole = count_parameters(spec)
    assert sum(shard.parameters for shard in shards) == pytest.approx(whole)
    widths = Widths(1.0, 1.0)
    total = sent_bytes(step_messages(shards, zero, widths))
    total += m * sent_bytes(forward_messages(shards, zero, widths))
    total += m * sent_bytes(backward_messages(shards, zero, widths))
    tables = 2 * spec.vocab * spec.hidden + spec.hidden
    expected = {0: 2 * whole, 1: 2 * whole, 2: (1 + m) * whole, 3: m * (3 * whole - tables)}[zero]
    assert total == pytest.approx((n - 1) / n * expected)


def test_replicas_sum_what_zero_left_them() -> None:
    spec = job({}).model
    shards = list(model_shards(spec, Share(1, 64, 64), 8, 8, replicas=2))
    over = [message for message in step_messages(shards, 3, Widths(1.0, 1.0)) if message.axis == "replica"]
    assert sum(message.bytes for message in over) == pytest.approx(count_parameters(spec) / 4)
    assert {message.ranks for message in over} == {2}


def of_experts(layout: dict[str, Any], **changes: Any) -> Iteration:
    return simulate_iteration(job(layout, {"preset": "mixtral-8x7b"}, workload__seq_len=4096, **changes))


def test_experts_are_spread_and_tokens_travel() -> None:
    alone, spread = of_experts({"dp": 8}), of_experts({"dp": 8, "ep": 8, "expert_tp": 1})
    assert "exposed ep" not in alone.breakdown and spread.breakdown["exposed ep"] > 0
    assert spread.breakdown["experts"] == pytest.approx(alone.breakdown["experts"], rel=0.3)


@pytest.mark.parametrize(
    "preset", ["deepseek-v3", "jamba1.5-mini", "zamba2-2.7b", "nemotron-h-8b", "mamba2-2.7b"]
)
def test_every_kind_of_unit_is_simulated(preset: str) -> None:
    found = simulate_iteration(job({"dp": 8}, {"preset": preset}, workload__seq_len=4096))
    assert found.seconds > 0 and sum(found.breakdown.values()) == pytest.approx(found.seconds)

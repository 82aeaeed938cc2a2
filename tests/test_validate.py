"""Tables of published measurements: read as jobs by documented rules, or refused with the reason."""

import csv
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from brigata.describe.errors import JobError
from brigata.validate import rules
from brigata.validate.jobs import job_of
from brigata.validate.outcome import Outcome, predict_rows
from brigata.validate.statistics import as_dict, errors_of, memory_errors, orderings, spearman
from brigata.validate.tables import RefusedRowError, Row, read_rows

PUBLISHED = Path(str(resources.files("brigata.validate") / "published.csv"))
GPT = {
    "id": "one",
    "source_key": "here",
    "framework": "Megatron-LM",
    "model": "GPT-22B",
    "arch": "dense",
    "layers": "48",
    "hidden": "6144",
    "heads": "64",
    "ffn": "24576",
    "vocab": "51200",
    "seq_len": "2048",
    "hw_key": "A100-SXM4-80GB",
    "gpus": "8",
    "gpus_per_node": "8",
    "tp": "8",
    "pp": "1",
    "micro_batch": "4",
    "global_batch": "4",
    "recompute": "full",
    "precision": "FP16 mixed",
    "iter_time_s": "1.42",
    "status": "ok",
}


def row(**changes: str) -> Row:
    return Row(GPT | changes)


def test_a_row_becomes_the_job_that_it_measured() -> None:
    job = job_of(row())
    assert (job.cluster.preset, job.cluster.software) == ("a100-sxm4-80gb", "megatron-2021")
    assert (job.model.mlp, job.model.positions, job.model.tie_embeddings) == ("gelu_tanh", "learned", True)
    assert (job.layout.tp, job.dp, job.layout.recompute, job.layout.sequence_parallel) == (
        8,
        1,
        "full",
        False,
    )
    assert job.train.precision == "fp16" and job.accumulation == 1
    selective = job_of(row(recompute="selective"))
    assert selective.layout.sequence_parallel  # arXiv 2205.05198 introduces both


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": ""}, "tp is missing"),
        ({"framework": "a script"}, "framework = 'a script' is not known"),
        ({"hw_key": "abacus"}, "device 'abacus' is not described"),
        ({"micro_batch": ""}, "micro_batch is missing"),
        ({"micro_batch": "3"}, "workload.micro_batch = 3 does not divide"),
        ({"dp": "2", "global_batch": "8"}, "tp * cp * pp * dp = 16 is not gpus = 8"),
        ({"layers": "many"}, "layers = 'many' is no number"),
        (
            {"arch": "hybrid_linear_moe"},
            "the shape of 'GPT-22B' (arch = 'hybrid_linear_moe') is not in the row",
        ),
        ({"vocab": "", "model": "unknown"}, "vocab is missing"),
        ({"pp_schedule": "DualPipe"}, "pp_schedule = 'DualPipe' is not modelled"),
        ({"iter_time_s": ""}, "neither a time"),
    ],
)
def test_rows_that_lack_something_are_refused_with_the_reason(changes: dict[str, str], reason: str) -> None:
    outcomes = predict_rows([row(**changes)])
    assert not outcomes.predicted
    assert reason in outcomes.refused[0][1]


@pytest.mark.parametrize(
    ("framework", "date", "software"),
    [
        ("Megatron-LM", "", "megatron-2021"),
        ("Megatron-DeepSpeed", "2022-02", "deepspeed-2022"),
        ("Megatron-LM + DeepSpeed ZeRO-3", "", "deepspeed-2021"),
        ("Megatron-LM fork (zero-bubble)", "", "megatron-2021"),
        ("NeMo/Megatron-Core", "NeMo 24.07", "megatron-2024"),
        ("Megatron-Core/NeMo", "NeMo 25.09", "megatron-2025"),
        ("Megatron-Core/NeMo", "NeMo 26.06", "megatron-2026"),
        ("NeMo/Megatron-Core", "v25.04.02", "megatron-2024"),
        ("MosaicML llm-foundry / PyTorch FSDP", "", "pytorch-2023"),
        ("torchtitan", "2025", "pytorch-2023"),
        ("MaxText/JAX", "2025", "xla-2024"),
        ("PAXML/JAX", "", "paxml-2023"),
    ],
)
def test_frameworks_have_their_generation(framework: str, date: str, software: str) -> None:
    assert rules.software_of(row(framework=framework, stack_date=date)) == software


@pytest.mark.parametrize(
    ("said", "gbs"),
    [
        ("8xA100 NVSwitch; 8x200Gb/s HDR IB per node (Selene)", 25.0),
        ("NVLink/NVSwitch; 800Gb/s per node (4x200 HDR) per vTrain config", 12.5),
        ("1600Gb/s RoCE per node", 25.0),
        ("8xV100 hybrid-cube-mesh NVLink; one 100Gb/s EDR IB per node", 100 / 8 / 8),
        ("8xA100 NVLink; 4x100Gb/s Omni-Path per node (Jean Zay)", 50 / 8 * rules.OMNI_PATH),
        ("NVL72 NVLink5 domain", None),
        ("", None),
    ],
)
def test_networks_are_read(said: str, gbs: float | None) -> None:
    assert rules.network_of(row(interconnect=said)) == (None if gbs is None else pytest.approx(gbs))


def test_other_settings_are_read() -> None:
    assert [
        rules.zero_of(row(sharding=s)) for s in ("zero1(distributed optimizer)", "fsdp (zero3)", "hsdp", "")
    ] == [
        1,
        3,
        3,
        0,
    ]
    assert rules.zero_of(row(framework="Megatron-Core", sharding="")) == 1
    assert [rules.precision_of(row(precision=p)) for p in ("MXFP8", "NVFP4", "amp_bf16", "FP16", "")] == [
        "fp8",
        "fp4",
        "bf16",
        "fp16",
        "bf16",
    ]
    assert rules.recompute_of(row(recompute="full (block, 32 layers)"), "megatron-2024") == ("full", 32)
    assert rules.recompute_of(row(recompute="none (granularity null)"), "megatron-2024") == ("none", None)
    assert rules.schedule_of(row(pp_schedule="ZB-2p"), 1) == ("zb-h2", 1)
    assert rules.schedule_of(row(pp_schedule="1F1B-I"), 3) == ("interleaved", 3)
    assert rules.vocabulary_of(row(vocab="50257")) % (128 * 8) == 0  # padded under tp
    assert job_of(row(arch="dense_lora")).train.trained == "lora"


def test_proxies_have_the_layers_of_their_row() -> None:
    moe = {"arch": "moe", "model": "Mixtral-8x7B", "framework": "Megatron-Core", "precision": "BF16"}
    job = job_of(row(**moe, layers="4", tp="1", ep="8", dp="8", gpus="8", global_batch="8", micro_batch="1"))
    assert job.model.pattern == "*E" * 4 and job.model.experts is not None and job.layout.expert_tp == 1


def test_what_ran_and_does_not_say_how_recomputes_the_least_that_fits() -> None:
    llama = {
        "model": "LLAMA2_70B",
        "framework": "NeMo/Megatron-Core",
        "layers": "80",
        "hidden": "8192",
        "kv_heads": "8",
        "ffn": "28672",
        "recompute": "",
        "pp": "2",
        "gpus": "16",
        "global_batch": "16",
        "precision": "BF16",
    }
    large, small = (
        job_of(row(**llama, micro_batch="4")),
        job_of(row(**llama | {"layers": "8"}, micro_batch="1")),
    )
    assert small.layout.recompute == "none"
    assert large.layout.recompute == "full" and (large.layout.recompute_layers or 99) > 0


def test_the_table_that_comes_along_is_predicted() -> None:
    outcomes = predict_rows(read_rows([PUBLISHED]))
    assert len(outcomes.predicted) > 90 and not outcomes.refused
    assert all(o.row.text("source_url").startswith("https://") for o in outcomes.predicted)
    by_source: dict[str, list[Outcome]] = {}
    for outcome in outcomes.timed:
        by_source.setdefault(outcome.row.source, []).append(outcome)
    assert errors_of(by_source["korthikanti2022-t5"]).mape < 0.06
    assert errors_of(by_source["zerobubble2024-t4"]).mape < 0.08
    assert errors_of(by_source["vtrain-multi"]).mape < 0.12
    assert errors_of(outcomes.timed).median_ape < 0.08
    memory = memory_errors(outcomes)
    assert memory.rows > 20 and memory.mape < 0.06 and memory.refused_though_ran <= 0.02 * memory.ran + 1
    inside = sum(o.low <= (o.measured or 0) <= o.high for o in outcomes.timed)
    assert inside > 0.6 * len(outcomes.timed)


def test_json_has_the_keys_that_are_promised() -> None:
    found = as_dict(predict_rows([row(), row(id="two", tp="")]))
    assert found["rows"] == 2 and found["simulated"] == 1
    assert found["refused"] == [{"id": "two", "reason": "tp is missing"}]
    assert {"mape", "median_ape", "p90_ape", "bias", "by_source", "predictions"} <= found.keys()
    assert found["predictions"][0].keys() == {"id", "measured", "predicted", "low", "high"}
    assert found["mape"] == pytest.approx(abs(found["bias"]))
    json.dumps(found)


def pretended(predicted: list[float], measured: list[float]) -> list[Outcome]:
    """Layouts of one job with given times."""
    return [
        Outcome(row(iter_time_s=str(m)), job_of(row()), p, 0.9 * p, 1.1 * p, None, True)
        for p, m in zip(predicted, measured, strict=True)
    ]


def test_errors_and_orderings_are_what_they_are_called() -> None:
    found = errors_of(pretended([1.1, 0.8, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]))
    assert (found.rows, found.mape, found.median_ape) == (4, pytest.approx(0.325), pytest.approx(0.15))
    assert found.bias == pytest.approx(0.225)
    measured = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    (right,) = orderings(pretended(measured, measured))
    assert (right.spearman, right.regret, right.rows) == (pytest.approx(1.0), 0.0, 6)
    (wrong,) = orderings(pretended(measured[::-1], measured))
    assert (wrong.spearman, wrong.regret) == (pytest.approx(-1.0), pytest.approx(5.0))
    assert orderings(pretended(measured[:5], measured[:5])) == []
    assert spearman([1, 1, 2, 3], [1, 1, 2, 3]) == pytest.approx(1.0)


def test_wrong_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file"):
        list(read_rows([tmp_path / "absent.csv"]))
    table = tmp_path / "other.csv"
    table.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(JobError, match="the column 'id' is missing"):
        list(read_rows([table]))
    table.write_bytes(b"id,source_key,framework,model\n\xff,a,b,c\n")
    with pytest.raises(JobError, match="not UTF-8"):
        list(read_rows([table]))


def test_a_row_of_ones_own_is_predicted(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer: Any = csv.DictWriter(file, GPT)
        writer.writeheader()
        writer.writerow(GPT)
    (outcome,) = predict_rows(read_rows([table])).predicted
    assert outcome.error == pytest.approx(0, abs=0.12)


def test_doubtful_rows_do_not_count() -> None:
    for doubt in ("EXCLUDE from timing", "LAYOUT INCONSISTENT"):
        assert not row(notes=doubt).judged
    assert not row(verification="digitized_figure (+-3%)").judged
    assert row(notes="paper excludes DP").judged
    with pytest.raises(RefusedRowError):
        row(gpus="").need("gpus")

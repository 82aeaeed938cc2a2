"""Serving: what a prefill and a decoding step cost, and what follows from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from brigata.cost.caches import cache_bytes
from brigata.cost.units import Share
from brigata.describe.job import Job, parse_job
from brigata.describe.model import ModelSpec
from brigata.simulate.inference import Serving, serve_times
from brigata.validate.outcome import predict_rows
from brigata.validate.tables import Row
from test_cli_simulate import brigata


def job(serve: dict[str, Any], layout: dict[str, Any] | None = None, preset: str = "llama3.1-70b") -> Job:
    return parse_job(
        {
            "version": 1,
            "model": {"preset": preset},
            "cluster": {"preset": "h200-sxm-141gb", "software": "serving-2025"},
            "workload": {"seq_len": 2048, "global_batch": 1},
            "layout": {"dp": 1, "zero": 0} | (layout or {"tp": 4}),
            "serve": {"prompt": 1024, "output": 1024, "batch": 16, "mode": "continuous"} | serve,
        },
        run=False,
    )


def served(serve: dict[str, Any], layout: dict[str, Any] | None = None, **more: Any) -> Serving:
    return serve_times(job(serve, layout, **more))


def test_decoding_is_bound_by_the_bytes_that_it_reads() -> None:
    one = served({"batch": 1})
    weights = 70e9 * 2 / 4 / 4800e9
    assert weights < one.decode.seconds < 2.2 * weights
    assert served({"batch": 16}).decode.seconds < 1.5 * one.decode.seconds
    assert served({"batch": 1, "weights": "fp8"}).decode.seconds < 0.75 * one.decode.seconds
    assert served({"batch": 1, "weights": "int8"}).decode.seconds < 0.75 * one.decode.seconds


def test_prefill_is_bound_by_operations() -> None:
    short, long = served({"prompt": 1024}), served({"prompt": 8192})
    assert 6 < long.prefill.seconds / short.prefill.seconds < 12
    least = 2 * 69e9 * 8192 / (4 * 989e12)
    assert least < long.prefill.seconds < 3 * least


def test_longer_contexts_and_larger_batches_take_longer() -> None:
    assert served({"prompt": 8192}).decode.seconds > served({}).decode.seconds
    assert served({"batch": 128}).tpot_s > served({"batch": 16}).tpot_s
    assert served({"batch": 128}).tokens_per_s > served({"batch": 16}).tokens_per_s
    assert served({"cache": "fp8", "prompt": 32768}).decode.seconds < served({"prompt": 32768}).decode.seconds


def test_continuous_batching_prefills_between_steps() -> None:
    static, continuous = served({"mode": "static"}), served({"mode": "continuous"})
    assert static.ttft_s > continuous.prefill.seconds  # the whole batch at once
    assert continuous.tpot_s == pytest.approx(
        continuous.decode.seconds + 16 / 1024 * continuous.prefill.seconds
    )
    assert continuous.ttft_s > continuous.prefill.seconds
    assert static.latency_s == pytest.approx(static.ttft_s + 1023 * static.tpot_s)
    assert continuous.tokens_per_s == pytest.approx(16 / continuous.tpot_s)


def test_tensor_parallelism_lowers_latency_and_replicas_add_throughput() -> None:
    assert served({}, {"tp": 8}).tpot_s < served({}, {"tp": 2}).tpot_s
    assert served({}, {"tp": 4, "dp": 2}).tokens_per_s == pytest.approx(
        2 * served({}, {"tp": 4}).tokens_per_s
    )
    piped = served({"batch": 1}, {"tp": 4, "pp": 2})
    assert piped.decode.seconds > served({"batch": 1}).decode.seconds  # no gain for one sequence


def test_caches_are_those_of_the_formula() -> None:
    llama = ModelSpec.model_validate({"preset": "llama3.1-70b"})
    assert cache_bytes(llama, Share(1, 1, 1), 1000, 2.0) == 2 * 80 * 8 * 128 * 1000 * 2
    assert (
        cache_bytes(llama, Share(1, 1, 1, tp=16), 1000, 2.0) == 2 * 80 * 1 * 128 * 1000 * 2
    )  # a head at least
    mamba = ModelSpec.model_validate({"preset": "mamba2-2.7b"})
    assert cache_bytes(mamba, Share(1, 1, 1), 10, 2.0) == cache_bytes(mamba, Share(1, 1, 1), 10**6, 2.0)
    assert mamba.mamba is not None
    inner, mixed = mamba.mamba.inner, mamba.mamba.groups * mamba.mamba.state
    each = inner * mamba.mamba.state * 4 + 3 * (inner + 2 * mixed) * 2
    assert cache_bytes(mamba, Share(1, 1, 1), 10, 2.0) == 64 * each
    deepseek = ModelSpec.model_validate({"preset": "deepseek-v3"})
    assert cache_bytes(deepseek, Share(1, 1, 1), 1000, 2.0) == 61 * (512 + 64) * 1000 * 2


def test_what_fits_is_counted() -> None:
    roomy, tight = served({}), served({"batch": 4096})
    assert roomy.fits and not tight.fits and roomy.capacity == tight.capacity
    assert served({}, {"tp": 1}).capacity < 0.25 * served({}, {"tp": 4}).capacity
    assert served({"weights": "fp8"}).capacity > roomy.capacity
    assert served({}, {"tp": 1}, preset="llama3.1-405b").capacity == 0


@pytest.mark.parametrize(
    "preset", ["deepseek-v3", "mixtral-8x7b", "mamba2-2.7b", "nemotron-h-8b", "gemma2-27b"]
)
def test_every_family_is_served(preset: str) -> None:
    layout = {"tp": 8, "ep": 8, "expert_tp": 1} if preset == "deepseek-v3" else {"tp": 8}
    found = served({"weights": "fp8"}, layout, preset=preset)
    assert 0 < found.decode.seconds < found.prefill.seconds
    json.dumps(found.as_dict())


def test_published_tokens_are_near() -> None:
    """Llama 3.1 70B, fp8, two H200, vLLM: 14.2 ms a token, 4 x (1,024 in, 8,192 out); aiconfigurator."""
    row = Row(
        {
            "id": "one",
            "source_key": "aic-silicon",
            "engine": "vllm",
            "model": "meta-llama/Llama-3.1-70B",
            "hw_key": "H200-SXM-141GB",
            "gpus": "2",
            "tp": "2",
            "mode": "agg",
            "precision": "gemm=fp8;moe=fp8;label=fp8",
            "isl": "1024",
            "osl": "8192",
            "batch": "4",
            "tpot_ms": "14.2",
        }
    )
    (found,) = predict_rows([row]).served
    assert found.what == "tpot" and abs(found.error) < 0.25
    refused = predict_rows(
        [Row(row.cells | {"mode": "disagg"}), Row(row.cells | {"engine": "abacus"})]
    ).refused
    assert [reason for _, reason in refused] == [
        "mode = 'disagg' is not modelled",
        "engine = 'abacus' is not modelled",
    ]


def test_a_job_with_requests_is_served_from_the_shell(tmp_path: Path) -> None:
    path, out = tmp_path / "job.toml", tmp_path / "out.json"
    path.write_text(
        'version = 1\n[model]\npreset = "llama3.1-70b"\n[cluster]\npreset = "h200-sxm-141gb"\n'
        'software = "serving-2025"\n[workload]\nseq_len = 2048\nglobal_batch = 1\n[layout]\ntp = 4\n'
        "[serve]\nprompt = 1024\noutput = 1024\nbatch = 16\n",
        encoding="utf-8",
    )
    result = brigata("simulate", path, "--json", out)
    assert result.returncode == 0, result.stderr
    for word in ("first token", "each token", "capacity", "A decoding step", "fits"):
        assert word in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
    assert {"ttft_s", "tpot_s", "tokens_per_s", "capacity_sequences"} <= json.loads(out.read_text()).keys()
    assert brigata("simulate", path, "--trace", out).returncode == 2
    refused = brigata("train", path, "--set", "cluster.preset=local", "--set", "cluster.software=brigata")
    assert refused.returncode == 2 and "[serve] is planned only" in refused.stderr

"""A row of a table of inference measurements as a job with a ``[serve]`` section, and what it measured."""

import re
from typing import Any

from brigata.describe.errors import JobError
from brigata.describe.job import Job, parse_job
from brigata.simulate.inference import Serving, serve_times
from brigata.validate import rules
from brigata.validate.devices import device_of
from brigata.validate.jobs import model_of
from brigata.validate.tables import RefusedRowError, Row

ENGINES = (
    (r"fastertransformer", "fastertransformer-2022"),
    (r"trtllm|tensorrt|vllm|sglang", "serving-2025"),
)
"""Words of ``engine`` -> generation."""
NAMES = {
    "llama318b": "llama3.1-8b",
    "llama3170b": "llama3.1-70b",
    "llama3370b": "llama3.1-70b",
    "llama31405b": "llama3.1-405b",
    "deepseekr1": "deepseek-v3",
    "deepseekv3r1": "deepseek-v3",
    "qwen332b": "qwen3-32b",
    "qwen38b": "qwen3-8b",
    "deepseekr1nvfp4": "deepseek-v3",
    "qwen332bnvfp4": "qwen3-32b",
}
"""Names of models in tables of inference, without their maker -> preset."""


LARGEST_TP = 8
"""Of a mixture of experts; beyond, tables count experts' ranks in ``tp``, and attention's layout is open."""
REQUESTS_EACH = 10
"""Requests that each client of a load test sends in turn, all clients beginning at once (as InferenceMAX)."""


def is_serving(row: Row) -> bool:
    """Whether a row is of inference."""
    return bool(row.text("engine"))


def serving_of(row: Row) -> Serving:
    """The prediction of an inference row.

    Raises:
        RefusedRowError: a needed field is missing, or what it describes is not modelled.
    """
    return serve_times(serving_job(row))


def serving_job(row: Row) -> Job:
    """The job that an inference row measured."""
    engine = row.text("engine").lower()
    software = next((name for pattern, name in ENGINES if re.search(pattern, engine)), None)
    if software is None:
        raise RefusedRowError(f"engine = {row.text('engine')!r} is not modelled")
    mode = row.text("mode")
    if not mode.startswith(("static", "agg")):
        raise RefusedRowError(f"mode = {mode!r} is not modelled")
    tp, pp = row.need("tp"), row.count("pp")
    serve: dict[str, Any] = {
        "prompt": row.need("isl"),
        "output": row.need("osl"),
        "batch": row.need("batch"),
        "mode": "static" if mode.startswith("static") else "continuous",
        "weights": _weights(row),
        "cache": "fp8" if "fp8" in row.text("kv_precision").lower() else "16bit",
    }
    layout: dict[str, Any] = {"tp": tp, "pp": pp, "dp": 1, "zero": 0, "sequence_parallel": False}
    model = _model(row)
    if tp > LARGEST_TP and ("experts" in model or "deepseek" in row.text("model").lower()):
        raise RefusedRowError(f"tp = {tp} over nodes does not say how attention is cut")
    if row.count("attention_dp") > 1 or row.count("dp") > 1:
        raise RefusedRowError("attention under data parallelism is not modelled")
    if "experts" in model or model.get("preset") in ("deepseek-v3",):
        layout |= {"ep": row.count("ep"), "expert_tp": max(tp // row.count("ep"), 1)}
    data = {
        "version": 1,
        "model": model,
        "cluster": {"preset": device_of(row.text("hw_key") or row.text("gpu")), "software": software},
        "workload": {"seq_len": serve["prompt"] + serve["output"], "global_batch": serve["batch"]},
        "layout": layout,
        "serve": serve,
    }
    try:
        return parse_job(data, run=False)
    except JobError as error:
        raise RefusedRowError(error.refusals[0]) from None


def _weights(row: Row) -> str:
    said = row.text("precision").lower()
    for word, weights in (("gemm=nvfp4", "fp4"), ("fp4", "fp4"), ("fp8", "fp8"), ("int8", "int8")):
        if word in said:
            return weights
    return "16bit"


def _model(row: Row) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]", "", row.text("model").lower().split("/")[-1])
    if name in NAMES:
        return {"preset": NAMES[name]}
    preset = rules.preset_of(row)
    if preset is None and not row.text("hidden"):
        raise RefusedRowError(f"the shape of {row.text('model')!r} is not in the row and no preset")
    return model_of(Row(row.cells | {"seq_len": str(row.need("isl") + row.need("osl"))}))


def compared(row: Row, serving: Serving) -> dict[str, tuple[float, float]]:
    """What a row publishes: name -> measured and predicted, in seconds or tokens a second."""
    found: dict[str, tuple[float, float]] = {}
    for column, predicted in (
        ("latency_ms", serving.latency_s),
        ("ttft_ms", serving.mean_ttft_s(REQUESTS_EACH)),
        ("tpot_ms", serving.tpot_s),
    ):
        measured = row.number(column)
        if measured:
            found[column.removesuffix("_ms")] = (measured / 1e3, predicted)
    return found

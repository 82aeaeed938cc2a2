"""A row of a table as a job."""

from typing import Any

from brigata.describe.device import device_names
from brigata.describe.errors import JobError
from brigata.describe.job import Job, parse_job
from brigata.describe.presets import MODEL_PRESETS
from brigata.validate import rules
from brigata.validate.devices import device_of
from brigata.validate.least_recompute import with_least_recompute
from brigata.validate.tables import RefusedRowError, Row

PLAIN_KINDS = ("", "dense", "dense_lora", "moe", "dense (ALiBi)", "dense (parallel residual, rotary)")
"""Kinds of models whose shape a table's columns say."""


def job_of(row: Row) -> Job:
    """The job that a row measured.

    Raises:
        RefusedRowError: a needed field is missing, or what it describes is not modelled.
    """
    software = rules.software_of(row)
    layout, workload = _spread(row, software)
    device = device_of(row.text("hw_key") or row.text("gpu"))
    assert device in device_names()
    devices = row.need("gpus")
    cluster: dict[str, Any] = {"preset": device, "software": software}
    if row.number("gpus_per_node"):
        cluster["node_devices"] = row.count("gpus_per_node")
    if (network := rules.network_of(row)) is not None:
        cluster["network_gbs"] = network
    train: dict[str, Any] = {"precision": rules.precision_of(row)}
    if "lora" in row.text("arch") or "lora" in row.text("notes").lower():
        train["trained"] = "lora"
    data = {
        "version": 1,
        "model": model_of(row),
        "cluster": cluster,
        "workload": workload,
        "layout": layout,
        "train": train,
    }
    try:
        job = parse_job(data, run=False)
    except JobError as error:
        raise RefusedRowError(error.refusals[0]) from None
    if job.ranks != devices:
        raise RefusedRowError(f"tp * cp * pp * dp = {job.ranks} is not gpus = {devices}")
    return with_least_recompute(job) if rules.recompute_is_open(row, software) else job


def _spread(row: Row, software: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Layout and workload."""
    tp, pp, cp = row.need("tp"), row.need("pp"), row.count("cp")
    dp = row.count("dp", row.need("gpus") // (tp * pp * cp))
    batch = row.need("global_batch")
    micro = row.number("micro_batch")
    if micro is None:
        steps = row.number("grad_accum")
        if steps is None:
            raise RefusedRowError("micro_batch is missing")
        micro = batch / dp / steps
    recompute, layers = rules.recompute_of(row, software)
    schedule, stages = rules.schedule_of(row, row.count("vpp"))
    layout: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": dp,
        "recompute": recompute,
        "zero": rules.zero_of(row),
        "sequence_parallel": rules.sequence_parallel_of(row, software, tp),
    }
    if layers is not None:
        layout["recompute_layers"] = layers
    if "hsdp" in row.text("sharding").lower():
        layout["dp_replicate"] = max(dp // row.count("gpus_per_node", 8), 1)
    if pp > 1:
        layout |= {"schedule": schedule, "virtual_stages": stages}
    if row.count("ep") > 1:
        layout |= {"ep": row.count("ep")}
    if row.text("arch").startswith(("moe", "hybrid")):
        layout |= {"expert_tp": row.count("etp", 1 if row.count("ep") > 1 else tp)}
    if "ulysses" in row.text("notes").lower():
        layout["cp_method"] = "ulysses"
    return layout, {"seq_len": row.need("seq_len"), "global_batch": batch, "micro_batch": max(int(micro), 1)}


def model_of(row: Row) -> dict[str, Any]:
    """The model's shape: a preset, cut to the row's layers, or what the columns say."""
    preset = rules.preset_of(row)
    arch = row.text("arch")
    if preset is not None and preset in MODEL_PRESETS:
        layers = row.number("layers")
        return _cut(MODEL_PRESETS[preset], preset, None if layers is None else int(layers))
    if preset is not None or arch not in PLAIN_KINDS:
        raise RefusedRowError(
            f"the shape of {row.text('model')!r} (arch = {arch!r}) is not in the row and no preset"
        )
    hidden, heads, layers = row.need("hidden"), row.need("heads"), row.need("layers")
    plain = rules.is_plain(row)
    if row.number("ffn") is None and not plain:
        raise RefusedRowError("ffn is missing")
    model: dict[str, Any] = {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": row.count("kv_heads", heads),
        "ffn": row.count("ffn", 4 * hidden),
        "vocab": rules.vocabulary_of(row),
        "pattern": f"(*-){layers}",
    }
    if hidden % heads or hidden // heads % 2:
        model["head_dim"] = round(hidden / heads / 2) * 2
    if plain:
        tied = "nemotron" not in row.text("model").lower()
        model |= {
            "mlp": "gelu_tanh",
            "norm": "layernorm",
            "positions": "learned",
            "tie_embeddings": tied,
            "max_positions": row.need("seq_len"),
        }
    if arch == "moe":
        model["pattern"] = f"(*E){layers}"
        model["experts"] = {"count": row.need("experts"), "top_k": row.need("topk"), "ffn": model["ffn"]}
    return model


def _cut(keys: dict[str, Any], preset: str, layers: int | None) -> dict[str, Any]:
    """The preset with so many layers, for proxies that have fewer."""
    from brigata.describe.pattern import expand_pattern
    from brigata.simulate.arrangement import split_layers

    units = expand_pattern(keys["pattern"])
    whole = split_layers(units)
    if layers is None or layers in (len(whole), len(units)):
        return {"preset": preset}
    if layers > len(whole):
        raise RefusedRowError(f"layers = {layers} is more than the {len(whole)} of {preset}")
    return {"preset": preset, "pattern": "".join(whole[:layers])}

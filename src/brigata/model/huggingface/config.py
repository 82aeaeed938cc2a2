"""Reading a foreign config.json: what is asked for, what is known to change nothing, what is refused."""

import math
from collections.abc import Mapping
from typing import Any

from brigata.describe.errors import JobError, one_of
from brigata.describe.model import ModelSpec

HARMLESS = frozenset(
    [
        "_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "auto_map", "bos_token_id",
        "cache_implementation", "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id",
        "gradient_checkpointing", "hidden_dropout", "id2label", "initializer_range",
        "keys_to_ignore_at_inference", "label2id", "mamba_ssm_cache_dtype", "model_type",
        "moe_shared_expert_overlap", "mtp_layers_block_type", "n_ctx", "num_logits_to_keep",
        "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
        "pretraining_tp", "problem_type", "reorder_and_upcast_attn", "rescale_prenorm_residual",
        "resid_pdrop", "residual_dropout", "residual_in_fp32", "return_dict", "return_dict_in_generate",
        "router_jitter_noise", "sep_token_id", "summary_activation", "summary_first_dropout",
        "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
        "time_step_floor", "time_step_max", "time_step_min", "time_step_rank", "tokenizer_class",
        "torch_dtype", "transformers_version", "unk_token_id", "use_cache", "use_mamba_kernels",
        "z_loss_coefficient",
    ]
)  # fmt: skip
"""Keys that change nothing of what a model computes in evaluation, or only how it is trained or stored."""
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
"""Activations of gated feed-forwards."""


class Config:
    """A config.json whose keys are read one by one; ``finish`` refuses what was not and might matter."""

    def __init__(self, data: Mapping[str, Any], family: str) -> None:
        self.data, self.family = data, family
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``; ``default`` where it is missing or null."""
        self._read.add(key)
        value = self.data.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """The value of ``key``.

        Raises:
            JobError: it is missing.
        """
        value = self.get(key)
        if value is None:
            raise JobError(f"config.json of {self.family!r} has no {key!r}; add it")
        return value

    def only(self, key: str, *values: Any) -> None:
        """Refuse any value of ``key`` but ``values``; missing and null are as good as the first.

        Raises:
            JobError: it has another one.
        """
        value = self.get(key, values[0])
        if value not in values:
            raise JobError(
                f"config.json: {key} = {value!r} is not supported for {self.family!r}; use {one_of(values)}"
            )

    def gated_activation(self, key: str = "hidden_act") -> str:
        """Our name of a gated feed-forward's activation."""
        self.only(key, *ACTIVATIONS)
        return ACTIVATIONS[self.get(key, "silu")]

    def limit(self, value: Any) -> float | None:
        """A number that may be written as infinity in several ways; None for infinity."""
        if isinstance(value, dict):
            value = value.get("__float__")
        number = float(value)
        return None if math.isinf(number) else number

    def finish(self) -> None:
        """Refuse keys that nobody has read, unless they are switched off.

        Raises:
            JobError: names them all.
        """
        unknown = [
            f"config.json: {key} = {value!r} is not known for {self.family!r} and may change what the model "
            "computes; remove it if it does not"
            for key, value in self.data.items()
            if key not in self._read and key not in HARMLESS and value not in (None, False)
        ]
        if unknown:
            raise JobError(*unknown)


def read_rope(config: Config) -> dict[str, Any]:
    """Rotary keys of a description, from ``rope_parameters`` or the older separate keys."""
    parameters = dict(config.get("rope_parameters", {}))
    older = config.get("rope_scaling", {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta", 10_000.0)
    config.get("rope_theta")
    partial = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor", 1.0)
    scaling = parameters or dict(older)
    found: dict[str, Any] = {"rope_theta": float(theta)}
    if partial != 1.0:
        found["rotary_partial"] = float(partial)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind == "default":
        return found
    names = {
        "factor": "factor", "original_max_position_embeddings": "original_length",
        "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attention_factor",
        "short_factor": "short_factor", "long_factor": "long_factor",
    }  # fmt: skip
    if kind not in ("linear", "dynamic", "llama3", "yarn", "longrope"):
        raise JobError(
            f"config.json: rope_type = {kind!r} is not known; linear, dynamic, llama3, yarn or longrope is"
        )
    result: dict[str, Any] = {"kind": kind}
    for key, value in scaling.items():
        if value is None or (key == "truncate" and value is True):
            continue
        if key not in names:
            raise JobError(
                f"config.json: {key} = {value!r} of rope_type = {kind!r} is not supported; remove it"
            )
        whole = key == "original_max_position_embeddings"
        result[names[key]] = value if isinstance(value, list) else int(value) if whole else float(value)
    positions = config.get("max_position_embeddings")
    outer = config.get("original_max_position_embeddings")
    if kind == "dynamic":
        result["original_length"] = positions
    elif kind != "linear" and "original_length" not in result:
        result["original_length"] = outer or positions
    if kind == "longrope" and "factor" not in result and outer:
        result["factor"] = positions / outer
    found["rope_scaling"] = result
    return found


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    """``rope_parameters`` of a description."""
    parameters: dict[str, Any] = {"rope_theta": spec.rope_theta, "rope_type": "default"}
    if spec.rotary_dim is not None and spec.rotary_dim != spec.head_dim:
        parameters["partial_rotary_factor"] = spec.rotary_dim / spec.head_dim
    scaling = spec.rope_scaling
    if scaling is None:
        return parameters
    parameters["rope_type"] = scaling.kind
    parameters["factor"] = scaling.factor
    if scaling.kind not in ("linear", "dynamic"):
        parameters["original_max_position_embeddings"] = scaling.original_length
    by_kind = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor"),
        "longrope": ("short_factor", "long_factor", "attention_factor"),
    }
    for key in by_kind.get(scaling.kind, ()):
        value = getattr(scaling, key)
        if value is not None:
            parameters[key] = list(value) if isinstance(value, tuple) else value
    return parameters

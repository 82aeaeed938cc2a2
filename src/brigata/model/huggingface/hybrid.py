"""Mamba-2 and its hybrids: mamba2, bamba and nemotron_h."""

from collections.abc import Iterator
from typing import Any

from brigata.describe.errors import JobError
from brigata.describe.model import ModelSpec
from brigata.model.huggingface import blocks
from brigata.model.huggingface.config import Config
from brigata.model.huggingface.entries import Entry
from brigata.model.huggingface.transformer import read_shape, write_shape

BLOCK_TYPES = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E", "mlp": "-",
}  # fmt: skip
"""Nemotron-H's names of its blocks, old and new."""


NEMOTRON_UNUSED = (
    "rope_theta", "rope_parameters", "partial_rotary_factor", "rms_norm_eps", "norm_eps", "num_hidden_layers",
    "expand", "attention_head_dim", "mtp_hybrid_override_pattern", "mamba_proj_bias",
)  # fmt: skip
"""Keys of Nemotron-H's configuration that its code does not use, or that say what another key says."""


def _step_limits(config: Config) -> dict[str, Any]:
    low, high = config.get("time_step_limit", (0.0, "inf"))
    return {"step_min": float(low), "step_max": config.limit(high)}


def _written_limits(spec: ModelSpec) -> list[Any]:
    assert spec.mamba is not None
    high = spec.mamba.step_max
    return [spec.mamba.step_min, {"__float__": "Infinity"} if high is None else high]


def read_mamba2(config: Config) -> dict[str, Any]:
    """config.json of mamba2 -> keys of a description."""
    config.only("hidden_act", "silu", "swish")
    hidden, expand = config.need("hidden_size"), config.get("expand", 2)
    heads, width = config.need("num_heads"), config.get("head_dim", 64)
    if heads * width != hidden * expand:
        raise JobError(f"config.json: num_heads * head_dim = {heads * width} is not expand * hidden_size")
    for unused in ("intermediate_size", "num_attention_heads"):
        config.get(unused)
    mamba = {
        "heads": heads,
        "head_dim": width,
        "state": config.get("state_size", 128),
        "groups": config.get("n_groups", 8),
        "conv": config.get("conv_kernel", 4),
        "conv_bias": config.get("use_conv_bias", True),
        "bias": config.get("use_bias", False),
        "chunk": config.get("chunk_size", 256),
        **_step_limits(config),
    }
    return {
        "pattern": "M" * config.need("num_hidden_layers"),
        "hidden": hidden,
        "vocab": config.need("vocab_size"),
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "mamba": mamba,
    }


def write_mamba2(spec: ModelSpec) -> dict[str, Any]:
    """A description -> config.json of mamba2."""
    mamba = spec.mamba
    assert mamba is not None
    return {
        "hidden_size": spec.hidden,
        "num_hidden_layers": len(spec.pattern),
        "vocab_size": spec.vocab,
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "expand": mamba.inner // spec.hidden,
        "num_heads": mamba.heads,
        "head_dim": mamba.head_dim,
        "state_size": mamba.state,
        "n_groups": mamba.groups,
        "conv_kernel": mamba.conv,
        "use_conv_bias": mamba.conv_bias,
        "use_bias": mamba.bias,
        "chunk_size": mamba.chunk,
        "time_step_limit": _written_limits(spec),
        "hidden_act": "silu",
    }


def mamba2_entries(spec: ModelSpec) -> Iterator[Entry]:
    """One mixer a layer."""
    yield from blocks.ends(spec, "backbone.embeddings.weight", "backbone.norm_f")
    for i in range(len(spec.pattern)):
        yield from blocks.norm(spec, f"backbone.layers.{i}.norm", f"units.{i}.norm")
        yield from blocks.mamba(spec, f"backbone.layers.{i}.mixer", f"units.{i}")


def read_bamba(config: Config) -> dict[str, Any]:
    """config.json of bamba -> keys of a description."""
    config.only("hidden_act", "silu", "swish")
    layers, attention = config.need("num_hidden_layers"), set(config.get("attn_layer_indices", []))
    types = config.get("layer_types")
    if types is not None:
        attention = {i for i, kind in enumerate(types) if kind in ("attention", "full_attention")}
    if "partial_rotary_factor" not in {**config.data, **(config.data.get("rope_parameters") or {})}:
        config.data = {**config.data, "partial_rotary_factor": 0.5}
    shape, bias = read_shape(config), config.get("attention_bias", False)
    width = config.get("mamba_d_head", "auto")
    inner = config.get("mamba_expand", 2) * shape["hidden"]
    heads = config.need("mamba_n_heads")
    mamba = {
        "heads": heads,
        "head_dim": inner // heads if width == "auto" else width,
        "state": config.get("mamba_d_state", 256),
        "groups": config.get("mamba_n_groups", 1),
        "conv": config.get("mamba_d_conv", 4),
        "conv_bias": config.get("mamba_conv_bias", True),
        "bias": config.get("mamba_proj_bias", False),
        "chunk": config.get("mamba_chunk_size", 256),
        **_step_limits(config),
    }
    return shape | {
        "pattern": "".join(("*" if i in attention else "M") + "-" for i in range(layers)),
        "mamba": mamba,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": config.get("mlp_bias", False),
    }


def write_bamba(spec: ModelSpec) -> dict[str, Any]:
    """A description -> config.json of bamba."""
    mamba = spec.mamba
    assert mamba is not None
    data = write_shape(spec)
    del data["head_dim"]
    return data | {
        "hidden_act": "silu",
        "attn_layer_indices": [i for i, letter in enumerate(spec.pattern[::2]) if letter == "*"],
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "mamba_n_heads": mamba.heads,
        "mamba_d_head": mamba.head_dim,
        "mamba_d_state": mamba.state,
        "mamba_n_groups": mamba.groups,
        "mamba_d_conv": mamba.conv,
        "mamba_conv_bias": mamba.conv_bias,
        "mamba_proj_bias": mamba.bias,
        "mamba_chunk_size": mamba.chunk,
        "mamba_expand": mamba.inner // spec.hidden,
        "time_step_limit": _written_limits(spec),
    }


def bamba_entries(spec: ModelSpec) -> Iterator[Entry]:
    """A mixer, Mamba-2 or attention, and an MLP a layer."""
    yield from blocks.ends(spec, "model.embed_tokens.weight", "model.final_layernorm")
    for i, letter in enumerate(spec.pattern[::2]):
        layer, mixer, mlp = f"model.layers.{i}", f"units.{2 * i}", f"units.{2 * i + 1}"
        yield from blocks.norm(spec, f"{layer}.input_layernorm", f"{mixer}.norm")
        if letter == "M":
            yield from blocks.mamba(spec, f"{layer}.mamba", mixer)
        else:
            yield from blocks.attention(spec, f"{layer}.self_attn", mixer)
        yield from blocks.norm(spec, f"{layer}.pre_ff_layernorm", f"{mlp}.norm")
        yield from blocks.mlp(spec, f"{layer}.feed_forward", mlp)


def read_nemotron_h(config: Config) -> dict[str, Any]:
    """config.json of nemotron_h -> keys of a description."""
    config.only("mlp_hidden_act", "relu2")
    config.only("mamba_hidden_act", "silu", "swish")
    config.only("moe_latent_size", None)
    config.only("num_nextn_predict_layers", 0)
    config.only("sliding_window", None)
    for unused in NEMOTRON_UNUSED:
        config.get(unused)
    older = config.get("hybrid_override_pattern")
    types = config.get("layers_block_type") or config.get("layer_types")
    pattern = older if types is None else "".join(BLOCK_TYPES.get(kind, "?") for kind in types)
    if not pattern or set(pattern) - set("M*E-"):
        raise JobError(
            f"config.json: layers_block_type = {types or older!r} is not supported; only {BLOCK_TYPES} are"
        )
    hidden, heads = config.need("hidden_size"), config.need("num_attention_heads")
    bias, groups = config.get("attention_bias", False), config.get("n_groups", 8)
    shape = {
        "pattern": pattern,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or config.data.get("attention_head_dim") or hidden // heads,
        "ffn": config.need("intermediate_size"),
        "vocab": config.need("vocab_size"),
        "max_positions": config.get("max_position_embeddings"),
        "positions": "none",
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "mlp": "relu2",
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": config.get("mlp_bias", False),
    }
    shape["mamba"] = {
        "heads": config.need("mamba_num_heads"),
        "head_dim": config.get("mamba_head_dim", 64),
        "state": config.get("ssm_state_size", 128),
        "groups": groups,
        "conv": config.get("conv_kernel", 4),
        "conv_bias": config.get("use_conv_bias", True),
        "bias": config.get("use_bias", False),
        "chunk": config.get("chunk_size", 128),
        **_step_limits(config),
    }
    routed = {
        "count": config.get("n_routed_experts", 8),
        "top_k": config.get("num_experts_per_tok", 2),
        "ffn": config.get("moe_intermediate_size", shape["ffn"]),
        "shared_ffn": config.get("moe_shared_expert_intermediate_size", 0)
        * bool(config.get("n_shared_experts", 1)),
        "router": "sigmoid",
        "normalize": config.get("norm_topk_prob", True),
        "scale": float(config.get("routed_scaling_factor", 1.0)),
        "groups": config.get("n_group", 1),
        "top_groups": config.get("topk_group", 1),
        "balance_bias": True,
    }
    return shape | ({"experts": routed} if "E" in pattern else {})


def write_nemotron_h(spec: ModelSpec) -> dict[str, Any]:
    """A description -> config.json of nemotron_h."""
    mamba, experts = spec.mamba, spec.experts
    assert mamba is not None
    names = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    assert set(spec.pattern) <= names.keys()
    data = {
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions or 4096,
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "layers_block_type": [names[letter] for letter in spec.pattern],
        "mlp_hidden_act": "relu2",
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.head_dim,
        "ssm_state_size": mamba.state,
        "n_groups": mamba.groups,
        "conv_kernel": mamba.conv,
        "use_conv_bias": mamba.conv_bias,
        "use_bias": mamba.bias,
        "chunk_size": mamba.chunk,
        "time_step_limit": _written_limits(spec),
    }
    if experts is not None:
        data |= {
            "n_routed_experts": experts.count,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.ffn,
            "moe_shared_expert_intermediate_size": experts.shared_ffn,
            "n_shared_experts": int(experts.shared_ffn > 0),
            "norm_topk_prob": experts.normalize,
            "routed_scaling_factor": experts.scale,
            "n_group": experts.groups,
            "topk_group": experts.top_groups,
        }
    return data


def nemotron_h_entries(spec: ModelSpec) -> Iterator[Entry]:
    """One block of four kinds a layer."""
    yield from blocks.ends(spec, "backbone.embeddings.weight", "backbone.norm_f")
    for i, letter in enumerate(spec.pattern):
        mixer, unit = f"backbone.layers.{i}.mixer", f"units.{i}"
        yield from blocks.norm(spec, f"backbone.layers.{i}.norm", f"{unit}.norm")
        match letter:
            case "M":
                yield from blocks.mamba(spec, mixer, unit)
            case "*":
                yield from blocks.attention(spec, mixer, unit)
            case "-":
                yield from blocks.mlp(spec, mixer, unit)
            case "E":
                names = blocks.LLAMA_EXPERTS if spec.gated else {"up": "up_proj", "down": "down_proj"}
                yield from blocks.experts(spec, mixer, unit, names)

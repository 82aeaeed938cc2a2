"""Dense Transformers: llama, mistral, qwen2, qwen3, gemma2 and gpt2."""

from collections.abc import Iterator
from typing import Any

from brigata.describe.errors import JobError
from brigata.describe.model import ModelSpec
from brigata.model.huggingface import blocks
from brigata.model.huggingface.config import Config, read_rope, write_rope
from brigata.model.huggingface.entries import Entry


def read_shape(config: Config) -> dict[str, Any]:
    """What all families with Llama's key names share."""
    hidden, heads = config.need("hidden_size"), config.need("num_attention_heads")
    shape = {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", hidden // heads),
        "ffn": config.need("intermediate_size"),
        "vocab": config.need("vocab_size"),
        "max_positions": config.get("max_position_embeddings"),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        **read_rope(config),
    }
    partial = shape.pop("rotary_partial", None)
    if partial is not None:
        shape["rotary_dim"] = int(shape["head_dim"] * partial)
    return shape


def write_shape(spec: ModelSpec) -> dict[str, Any]:
    """The same keys, the other way."""
    return {
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions or 2048,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "rope_parameters": write_rope(spec),
        "num_hidden_layers": len(spec.pattern) // 2,
    }


def windows(config: Config, layers: int, second: str = "-", always: bool = False) -> dict[str, Any]:
    """Pattern and window of attention layers, each followed by a unit of letter ``second``.

    ``always``: a window that is given holds in every layer (mistral); otherwise ``layer_types`` or the older
    ``use_sliding_window`` and ``max_window_layers`` say where.
    """
    window = config.get("sliding_window")
    types = config.get("layer_types")
    switched_on = config.get("use_sliding_window", always)
    full = config.get("max_window_layers", 0)
    if types is None:
        sliding = [bool(window and switched_on and i >= (0 if always else full)) for i in range(layers)]
    else:
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown or len(types) != layers:
            raise JobError(
                f"config.json: layer_types = {types!r} is not supported; name sliding_attention or "
                f"full_attention for each of the {layers} layers"
            )
        sliding = [kind == "sliding_attention" for kind in types]
    pattern = "".join(("w" if slides else "*") + second for slides in sliding)
    return {"pattern": pattern} | ({"window": window} if any(sliding) else {})


def layer_types(spec: ModelSpec) -> list[str]:
    """``layer_types`` of the attention units."""
    names = {"w": "sliding_attention", "*": "full_attention"}
    return [names[letter] for letter in spec.pattern if letter in names]


def read_llama(config: Config) -> dict[str, Any]:
    """config.json of llama -> keys of a description."""
    bias = config.get("attention_bias", False)
    return read_shape(config) | {
        "pattern": "*-" * config.need("num_hidden_layers"),
        "mlp": config.gated_activation(),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": config.get("mlp_bias", False),
    }


def write_llama(spec: ModelSpec) -> dict[str, Any]:
    """A description -> config.json of llama."""
    return write_shape(spec) | {
        "hidden_act": "silu" if spec.mlp == "swiglu" else "gelu_pytorch_tanh",
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
    }


def read_mistral(config: Config) -> dict[str, Any]:
    """config.json of mistral -> keys of a description."""
    layers = config.need("num_hidden_layers")
    return read_shape(config) | windows(config, layers, always=True) | {"mlp": config.gated_activation()}


def write_mistral(spec: ModelSpec) -> dict[str, Any]:
    """A description -> config.json of mistral."""
    return write_shape(spec) | {"hidden_act": "silu", "sliding_window": spec.window}


def read_qwen2(config: Config) -> dict[str, Any]:
    """config.json of qwen2 -> keys of a description."""
    layers = config.need("num_hidden_layers")
    shape = read_shape(config) | windows(config, layers)
    return shape | {"mlp": config.gated_activation(), "qkv_bias": True}


def write_qwen2(spec: ModelSpec) -> dict[str, Any]:
    """A description -> config.json of qwen2."""
    data = write_shape(spec) | {"hidden_act": "silu", "layer_types": layer_types(spec)}
    if spec.head_dim * spec.heads == spec.hidden and not spec.qk_norm:
        del data["head_dim"]  # qwen2 has no such key
    return data | {"use_sliding_window": "w" in spec.pattern, "sliding_window": spec.window}


def read_qwen3(config: Config) -> dict[str, Any]:
    """config.json of qwen3 -> keys of a description."""
    bias = config.get("attention_bias", False)
    layers = config.need("num_hidden_layers")
    shape = read_shape(config) | windows(config, layers) | {"mlp": config.gated_activation()}
    return shape | {"qk_norm": True, "qkv_bias": bias, "out_bias": bias}


def write_qwen3(spec: ModelSpec) -> dict[str, Any]:
    """A description -> config.json of qwen3."""
    return write_qwen2(spec) | {"attention_bias": spec.qkv_bias}


def read_gemma2(config: Config) -> dict[str, Any]:
    """config.json of gemma2 -> keys of a description."""
    layers = config.need("num_hidden_layers")
    if config.get("layer_types") is None and config.get("sliding_window") is not None:
        alternating = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
        config.data = {**config.data, "layer_types": alternating}
    config.only("use_bidirectional_attention", False)
    config.only("hidden_act", "gelu_pytorch_tanh")
    shape = read_shape(config) | windows(config, layers)
    return shape | {
        "mlp": config.gated_activation("hidden_activation")
        if "hidden_activation" in config.data
        else "geglu_tanh",
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "norm_from_one": True,
        "norm_place": "both",
        "embedding_multiplier": shape["hidden"] ** 0.5,
        "attention_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        "attention_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
        "qkv_bias": config.get("attention_bias", False),
        "out_bias": config.get("attention_bias", False),
    }


def write_gemma2(spec: ModelSpec) -> dict[str, Any]:
    """A description -> config.json of gemma2."""
    scale = spec.attention_scale or spec.head_dim**-0.5
    return write_shape(spec) | {
        "hidden_activation": "gelu_pytorch_tanh" if spec.mlp == "geglu_tanh" else "silu",
        "layer_types": layer_types(spec),
        "sliding_window": spec.window,
        "query_pre_attn_scalar": _whole(scale**-2),
        "attn_logit_softcapping": spec.attention_softcap,
        "final_logit_softcapping": spec.logit_softcap,
        "attention_bias": spec.qkv_bias,
    }


def _whole(value: float) -> float | int:
    """Whole numbers as such: rounding of the square root and back is taken away."""
    return round(value) if abs(value - round(value)) < 1e-6 else value


def llama_entries(spec: ModelSpec) -> Iterator[Entry]:
    """Tensors of all families with Llama's names."""
    yield from blocks.ends(spec, "model.embed_tokens.weight", "model.norm")
    for i in range(len(spec.pattern) // 2):
        layer, mixer, mlp = f"model.layers.{i}", f"units.{2 * i}", f"units.{2 * i + 1}"
        yield from blocks.norm(spec, f"{layer}.input_layernorm", f"{mixer}.norm")
        yield from blocks.attention(spec, f"{layer}.self_attn", mixer)
        if spec.norm_place == "both":
            yield from blocks.norm(spec, f"{layer}.post_attention_layernorm", f"{mixer}.norm_after")
            yield from blocks.norm(spec, f"{layer}.pre_feedforward_layernorm", f"{mlp}.norm")
            yield from blocks.norm(spec, f"{layer}.post_feedforward_layernorm", f"{mlp}.norm_after")
        else:
            yield from blocks.norm(spec, f"{layer}.post_attention_layernorm", f"{mlp}.norm")
        yield from blocks.mlp(spec, f"{layer}.mlp", mlp)


def read_gpt2(config: Config) -> dict[str, Any]:
    """config.json of gpt2 -> keys of a description."""
    config.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    hidden, heads = config.need("n_embd"), config.need("n_head")
    return {
        "pattern": "*-" * config.need("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "ffn": config.get("n_inner", 4 * hidden),
        "vocab": config.need("vocab_size"),
        "positions": "learned",
        "max_positions": config.need("n_positions"),
        "norm": "layernorm",
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "mlp": "gelu_tanh",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    """A description -> config.json of gpt2."""
    return {
        "n_embd": spec.hidden,
        "n_head": spec.heads,
        "n_layer": len(spec.pattern) // 2,
        "n_inner": spec.ffn,
        "n_positions": spec.max_positions,
        "vocab_size": spec.vocab,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": spec.tie_embeddings,
    }


def gpt2_entries(spec: ModelSpec) -> Iterator[Entry]:
    """GPT-2 keeps weights as (inputs, outputs), and query, key and value in one."""
    yield from blocks.ends(spec, "transformer.wte.weight", "transformer.ln_f")
    yield Entry("transformer.wpe.weight", ("positions.weight",))
    for i in range(len(spec.pattern) // 2):
        layer, mixer, mlp = f"transformer.h.{i}", f"units.{2 * i}", f"units.{2 * i + 1}"
        yield from blocks.norm(spec, f"{layer}.ln_1", f"{mixer}.norm")
        yield from blocks.norm(spec, f"{layer}.ln_2", f"{mlp}.norm")
        packed = [f"{mixer}.block.project_in.{name}" for name in ("q", "k", "v")]
        places = {
            "attn.c_attn": packed,
            "attn.c_proj": [f"{mixer}.block.project_out"],
            "mlp.c_fc": [f"{mlp}.block.project_in.up"],
            "mlp.c_proj": [f"{mlp}.block.project_out"],
        }
        for foreign, ours in places.items():
            weights = tuple(f"{name}.weight" for name in ours)
            yield Entry(f"{layer}.{foreign}.weight", weights, "transposed")
            yield Entry(f"{layer}.{foreign}.bias", tuple(f"{name}.bias" for name in ours))

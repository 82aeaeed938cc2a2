"""Mixtures of experts with attention: mixtral and qwen3_moe."""

from collections.abc import Iterator
from typing import Any

from brigata.describe.model import ModelSpec
from brigata.model.huggingface import blocks
from brigata.model.huggingface.config import Config
from brigata.model.huggingface.entries import Entry
from brigata.model.huggingface.transformer import read_shape, windows, write_shape


def read_mixtral(config: Config) -> dict[str, Any]:
    """config.json of mixtral -> keys of a description."""
    shape = read_shape(config) | windows(config, config.need("num_hidden_layers"), "E", always=True)
    experts = {
        "count": config.need("num_local_experts"),
        "top_k": config.need("num_experts_per_tok"),
        "ffn": shape["ffn"],
        "aux_loss": float(config.get("router_aux_loss_coef", 0.0)),
    }
    return shape | {"mlp": config.gated_activation(), "experts": experts}


def write_mixtral(spec: ModelSpec) -> dict[str, Any]:
    """A description -> config.json of mixtral."""
    assert spec.experts is not None
    return write_shape(spec) | {
        "hidden_act": "silu",
        "intermediate_size": spec.experts.ffn,
        "sliding_window": spec.window,
        "num_local_experts": spec.experts.count,
        "num_experts_per_tok": spec.experts.top_k,
        "router_aux_loss_coef": spec.experts.aux_loss,
    }


def read_qwen3_moe(config: Config) -> dict[str, Any]:
    """config.json of qwen3_moe -> keys of a description."""
    layers, step = config.need("num_hidden_layers"), config.get("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers", []))
    bias = config.get("attention_bias", False)
    window = windows(config, layers, "E", always=config.get("use_sliding_window", False))
    letters = list(window.pop("pattern"))
    for i in range(layers):
        if i in dense or (i + 1) % step:
            letters[2 * i + 1] = "-"
    experts = {
        "count": config.get("num_experts") or config.need("num_local_experts"),
        "top_k": config.need("num_experts_per_tok"),
        "ffn": config.need("moe_intermediate_size"),
        "normalize": config.get("norm_topk_prob", False),
        "aux_loss": float(config.get("router_aux_loss_coef", 0.0)),
    }
    config.get("num_local_experts")
    return read_shape(config) | window | {
        "pattern": "".join(letters),
        "mlp": config.gated_activation(),
        "experts": experts,
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
    }  # fmt: skip


def write_qwen3_moe(spec: ModelSpec) -> dict[str, Any]:
    """A description -> config.json of qwen3_moe."""
    assert spec.experts is not None
    return write_shape(spec) | {
        "hidden_act": "silu",
        "attention_bias": spec.qkv_bias,
        "use_sliding_window": "w" in spec.pattern,
        "sliding_window": spec.window,
        "num_experts": spec.experts.count,
        "num_experts_per_tok": spec.experts.top_k,
        "moe_intermediate_size": spec.experts.ffn,
        "norm_topk_prob": spec.experts.normalize,
        "router_aux_loss_coef": spec.experts.aux_loss,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, letter in enumerate(spec.pattern[1::2]) if letter == "-"],
    }


def _entries(spec: ModelSpec, block: str, names: dict[str, str]) -> Iterator[Entry]:
    yield from blocks.ends(spec, "model.embed_tokens.weight", "model.norm")
    for i in range(len(spec.pattern) // 2):
        layer, mixer, second = f"model.layers.{i}", f"units.{2 * i}", f"units.{2 * i + 1}"
        yield from blocks.norm(spec, f"{layer}.input_layernorm", f"{mixer}.norm")
        yield from blocks.attention(spec, f"{layer}.self_attn", mixer)
        yield from blocks.norm(spec, f"{layer}.post_attention_layernorm", f"{second}.norm")
        if spec.pattern[2 * i + 1] == "-":
            yield from blocks.mlp(spec, f"{layer}.mlp", second)
        else:
            yield from blocks.experts(spec, f"{layer}.{block}", second, names)


def mixtral_entries(spec: ModelSpec) -> Iterator[Entry]:
    """Mixtral's experts have the names of Llama's first code: w1 gate, w3 up, w2 down."""
    return _entries(spec, "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})


def qwen3_moe_entries(spec: ModelSpec) -> Iterator[Entry]:
    """Qwen3's experts have the names of its MLP."""
    return _entries(spec, "mlp", blocks.LLAMA_EXPERTS)

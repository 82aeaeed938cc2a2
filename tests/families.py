"""Tiny random models of every Hugging Face family that Brigata reads and writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

TINY: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "attention_bias": True, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 6, "head_dim": 8},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 12},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 24, "norm_topk_prob": True},
    "mamba2": {"expand": 2, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8,
               "time_step_limit": (0.001, 5.0)},
    "bamba": {"num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16,
              "mamba_n_groups": 2, "mamba_chunk_size": 8, "attn_layer_indices": [1], "num_hidden_layers": 3},
    "nemotron_h": {"num_key_value_heads": 2, "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8,
                   "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
                   "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
                   "layers_block_type": ["mamba", "attention", "moe", "mamba", "mlp"]},
}  # fmt: skip
"""Family -> what its tiny configuration changes beside the common shape."""
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


@contextmanager
def widened() -> Iterator[None]:
    """`transformers` computes norms, rotary tables and scans in fp32 whatever its weights: here in fp64."""
    names, cast = (torch.float32, torch.float), torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(names[0])
        torch.float32, torch.float = names
        torch.Tensor.float = cast


def tiny_config(family: str) -> Any:
    """The configuration of a tiny model of ``family``."""
    from transformers import AutoConfig

    common = {} if family == "gpt2" else COMMON
    changes = {**common, **TINY[family], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(family, **({"vocab_size": 64} | changes))


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny random model of ``family`` whose vectors are random too, in eager attention."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(len(family))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(tiny_config(family), **eager).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.rand_like(parameter).mul(8).add(1).log())
            elif parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name or name.endswith(".D")))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model.eval()


def save_tiny(family: str, folder: Path, **options: Any) -> Any:
    """The tiny model, saved as its family's checkpoint in ``folder``."""
    model = tiny_model(family)
    model.save_pretrained(folder, **options)
    return model

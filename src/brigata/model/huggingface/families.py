"""Every family that can be read and written, by its ``model_type``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from brigata.describe.model import ModelSpec
from brigata.model.huggingface import hybrid, mixture, transformer
from brigata.model.huggingface.config import Config
from brigata.model.huggingface.entries import Entry


@dataclass(frozen=True)
class Family:
    """How one family is read and written.

    Attributes:
        architecture: class that transformers makes of it.
        read: config.json -> keys of a description.
        write: a description -> config.json.
        entries: where its tensors lie.
    """

    architecture: str
    read: Callable[[Config], dict[str, Any]]
    write: Callable[[ModelSpec], dict[str, Any]]
    entries: Callable[[ModelSpec], Iterator[Entry]]


def _llama_like(
    architecture: str, read: Callable[[Config], dict[str, Any]], write: Callable[[ModelSpec], dict[str, Any]]
) -> Family:
    return Family(architecture, read, write, transformer.llama_entries)


FAMILIES: dict[str, Family] = {
    "llama": _llama_like("LlamaForCausalLM", transformer.read_llama, transformer.write_llama),
    "mistral": _llama_like("MistralForCausalLM", transformer.read_mistral, transformer.write_mistral),
    "qwen2": _llama_like("Qwen2ForCausalLM", transformer.read_qwen2, transformer.write_qwen2),
    "qwen3": _llama_like("Qwen3ForCausalLM", transformer.read_qwen3, transformer.write_qwen3),
    "gemma2": _llama_like("Gemma2ForCausalLM", transformer.read_gemma2, transformer.write_gemma2),
    "gpt2": Family(
        "GPT2LMHeadModel", transformer.read_gpt2, transformer.write_gpt2, transformer.gpt2_entries
    ),
    "mixtral": Family(
        "MixtralForCausalLM", mixture.read_mixtral, mixture.write_mixtral, mixture.mixtral_entries
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", mixture.read_qwen3_moe, mixture.write_qwen3_moe, mixture.qwen3_moe_entries
    ),
    "mamba2": Family("Mamba2ForCausalLM", hybrid.read_mamba2, hybrid.write_mamba2, hybrid.mamba2_entries),
    "bamba": Family("BambaForCausalLM", hybrid.read_bamba, hybrid.write_bamba, hybrid.bamba_entries),
    "nemotron_h": Family(
        "NemotronHForCausalLM", hybrid.read_nemotron_h, hybrid.write_nemotron_h, hybrid.nemotron_h_entries
    ),
}
"""``model_type`` -> family."""

"""Public shapes: parameter counts are those of `transformers`, or round to the published figure."""

import subprocess
import sys

import pytest
import torch

from brigata.describe import ModelSpec, count_active_parameters, count_parameters
from brigata.describe.pattern import RUNNING_LETTERS
from brigata.describe.presets import MODEL_PRESETS, merged, preset_source, published_billions
from brigata.model.huggingface import FAMILIES
from brigata.model.huggingface.convert import describes


def spec_of(name: str) -> ModelSpec:
    return ModelSpec.model_validate({"preset": name})


def family_of(spec: ModelSpec) -> str | None:
    """A family of `transformers` that describes ``spec``; None where there is none here."""
    return next((family for family in FAMILIES if describes(family, spec)), None)


def test_there_are_many_presets_and_each_names_its_source() -> None:
    assert len(MODEL_PRESETS) >= 60
    assert all(preset_source(name) for name in MODEL_PRESETS)


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_parameter_counts_are_those_of_transformers_or_as_published(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = spec_of(name)
    family, published = family_of(spec), published_billions(name)
    assert family is not None or published is not None, "nothing to check the count against"
    if family is not None:
        written = FAMILIES[family].write(spec)
        if "time_step_limit" in written:
            written["time_step_limit"] = (0.0, float("inf"))  # as its file spells it
        config = AutoConfig.for_model(family, **written)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert count_parameters(spec) == sum(parameter.numel() for parameter in model.parameters())
    if published is not None:
        assert count_parameters(spec) / 1e9 == pytest.approx(published, rel=0.012)


@pytest.mark.parametrize(
    ("name", "active_b"),
    [
        ("mixtral-8x7b", 12.9),
        ("qwen3-30b-a3b", 3.35),
        ("deepseek-v3", 37.6),
        ("jamba1.5-mini", 12.1),
        ("llama3-8b", 8.03),
    ],
)
def test_active_parameters_are_as_published(name: str, active_b: float) -> None:
    assert count_active_parameters(spec_of(name)) / 1e9 == pytest.approx(active_b, rel=0.02)


def test_shared_blocks_are_counted_as_transformers_counts_them() -> None:
    from transformers import AutoModelForCausalLM, Zamba2Config

    config = Zamba2Config(
        vocab_size=100, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=64,
        mamba_d_state=16, n_mamba_heads=4, mamba_headdim=16, mamba_ngroups=2, num_mem_blocks=2,
        adapter_rank=8, layer_types=["mamba", "hybrid"] * 3, hybrid_layer_ids=[1, 3, 5],
        use_shared_attention_adapter=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec = ModelSpec.model_validate({
        "pattern": "(MSM)3", "hidden": 32, "vocab": 100, "tie_embeddings": True,
        "mamba": {"heads": 4, "head_dim": 16, "state": 16, "groups": 2},
        "shared": {"blocks": 2, "heads": 4, "head_dim": 16, "ffn": 64, "adapter_rank": 8},
    })  # fmt: skip
    assert count_parameters(spec) == sum(parameter.numel() for parameter in model.parameters())


def test_presets_that_only_plan_say_so_by_their_letters() -> None:
    planned = {name for name in MODEL_PRESETS if set(spec_of(name).pattern) - set(RUNNING_LETTERS)}
    assert planned == {
        "deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2", "jamba1.5-mini", "jamba1.5-large",
        "falcon-mamba-7b",
    }  # fmt: skip


def test_a_jobs_keys_override_a_presets_section_by_section() -> None:
    spec = ModelSpec.model_validate({"preset": "mixtral-8x7b", "vocab": 500, "experts": {"top_k": 1}})
    assert spec.experts is not None
    assert (spec.vocab, spec.experts.top_k, spec.experts.count, spec.experts.ffn) == (500, 1, 8, 14336)
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}) == {"a": {"b": 3, "c": 2}, "d": 4}


def test_presets_are_read_only_when_they_are_asked_for() -> None:
    code = (
        "import sys, brigata.describe; from brigata.describe import presets\n"
        "sys.exit(presets._files.cache_info().currsize)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Every family comes in and goes out bitwise, and computes what `transformers` computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from brigata.describe import JobError
from brigata.model.checkpoint import load_model, read_spec, tensor_shapes
from brigata.model.huggingface import FAMILIES, export_checkpoint, import_checkpoint
from brigata.model.huggingface.entries import load_foreign
from brigata.model.sequences import Cache
from families import TINY, save_tiny, tiny_config, tiny_model, widened

TOKENS = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(0))
NOT_THE_MODEL = {
    "transformers_version",
    "architectures",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "dtype",
}


class Trip:
    """A tiny model of one family: as `transformers` saved it, as ours, and exported again."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.source, self.ours, self.back = folder / "source", folder / "ours", folder / "back"
        self.model = save_tiny(family, self.source)
        self.spec = import_checkpoint(self.source, self.ours)
        export_checkpoint(self.ours, self.back)


@pytest.fixture(scope="module", params=FAMILIES)
def trip(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trip:
    return Trip(request.param, tmp_path_factory.mktemp(request.param))


def test_every_family_has_a_tiny_model() -> None:
    assert TINY.keys() == FAMILIES.keys()


def test_the_round_trip_is_bitwise(trip: Trip) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (trip.source, trip.back))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
    first, second = (json.loads((f / "config.json").read_text()) for f in (trip.source, trip.back))
    for key in first.keys() - NOT_THE_MODEL:
        assert first[key] == second[key], key


def test_transformers_reads_what_is_exported(trip: Trip) -> None:
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(trip.back, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, trip.model(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_logits_in_fp32_are_those_of_transformers(trip: Trip) -> None:
    with torch.no_grad():
        theirs = trip.model(TOKENS).logits.flatten(0, 1)
        ours = load_model(trip.ours)(TOKENS)
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_logits_and_all_gradients_in_fp64_are_those_of_transformers(trip: Trip) -> None:
    with widened():
        theirs = tiny_model(trip.family, torch.float64)
        theirs.load_state_dict({n: t.double() for n, t in trip.model.state_dict().items()})
        logits = theirs(TOKENS).logits.flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, TOKENS.flatten(), reduction="sum").backward()
    model = load_model(trip.ours, torch.float64)
    assert (model(TOKENS) - logits).norm() / logits.norm() < 1e-10
    model(TOKENS, TOKENS).backward()
    mine = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = set()
    for name, expected in foreign_gradients(theirs, trip.back).items():
        entry = next(e for e in FAMILIES[trip.family].entries(trip.spec) if e.foreign == name)
        if entry.ours[0] not in mine:  # a buffer that steers the choice of experts
            continue
        found = load_foreign(entry, lambda own: mine[own])
        error = (found - expected).norm() / expected.norm().clamp(min=1e-9 * float(logits.norm()))
        assert error < 1e-10, f"{name}: {error:.1e}"
        compared |= set(entry.ours)
    assert compared == mine.keys()


def foreign_gradients(model: Any, folder: Path) -> dict[str, Tensor]:
    """Gradients of a model of `transformers` under the names of its files: saved in place of its weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    gradients = folder.parent / "gradients"
    model.save_pretrained(gradients)
    return load_file(gradients / "model.safetensors")


def test_decoding_token_by_token_is_the_whole_forward(trip: Trip) -> None:
    model = load_model(trip.ours, torch.float64)
    with torch.no_grad():
        whole = model(TOKENS).view(2, 24, -1)
        cache = Cache()
        parts = [
            model(part, cache=cache).view(2, part.shape[1], -1) for part in TOKENS.split([9, *[1] * 15], 1)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)


def test_shards_and_single_files_are_the_same(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "source", max_shard_size="20KB")
    assert not (tmp_path / "source" / "model.safetensors").exists()
    import_checkpoint(tmp_path / "source", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back", shard_bytes=10_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    from transformers import AutoModelForCausalLM

    again, model = AutoModelForCausalLM.from_pretrained(tmp_path / "back"), tiny_model("qwen3")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_bf16_files_stay_bf16(tmp_path: Path) -> None:
    tiny_model("llama").bfloat16().save_pretrained(tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("source", "back"))
    assert all(t.dtype == torch.bfloat16 and torch.equal(t, after[n]) for n, t in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path / "llama")
    return tmp_path / "llama"


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "'model.norm.weight' [32] is missing"),
        (lambda t: t.update({"model.extra": torch.zeros(3)}), "'model.extra' [3] is not part"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), "is [31], and the model's is [32]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(llama: Path, tmp_path: Path, change: Any, words: str) -> None:
    edit_tensors(llama, change)
    with pytest.raises(JobError) as refusal:
        import_checkpoint(llama, tmp_path / "ours")
    assert any(words in sentence for sentence in refusal.value.refusals)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "t5"}, "model_type = 't5' cannot be read"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"some_new_switch": True}, "some_new_switch = True is not known"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "'spiral' is not known"),
        ({"num_attention_heads": None}, "has no 'num_attention_heads'"),
    ],
)
def test_configurations_that_are_not_understood_are_refused(
    llama: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    edit_config(llama, **changes)
    with pytest.raises(JobError) as refusal:
        import_checkpoint(llama, tmp_path / "ours")
    assert any(words in sentence for sentence in refusal.value.refusals)


def test_pickles_are_never_opened(llama: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(JobError, match="pickle"):
        import_checkpoint(llama, tmp_path / "ours")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_cannot_lead_outside_its_folder(llama: Path, tmp_path: Path, name: str) -> None:
    (llama / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(JobError, match="not a file of its folder"):
        import_checkpoint(llama, tmp_path / "ours")


def test_a_filled_folder_is_not_written_into(llama: Path, tmp_path: Path) -> None:
    import_checkpoint(llama, tmp_path / "ours")
    with pytest.raises(JobError, match="not empty"):
        import_checkpoint(llama, tmp_path / "ours")
    with pytest.raises(JobError, match="not empty"):
        export_checkpoint(tmp_path / "ours", llama)


def test_a_model_that_no_family_describes_is_not_exported(llama: Path, tmp_path: Path) -> None:
    import_checkpoint(llama, tmp_path / "ours")
    path = tmp_path / "ours" / "model.toml"
    path.write_text(path.read_text() + "\nresidual_multiplier = 0.5\n".replace("\n", "", 1))
    text = path.read_text().splitlines()
    moved = [line for line in text if line.startswith("residual")] + [
        x for x in text if not x.startswith("residual")
    ]
    path.write_text("\n".join(moved) + "\n")
    with pytest.raises(JobError, match="describe this model"):
        export_checkpoint(tmp_path / "ours", tmp_path / "back")


def test_older_configurations_mean_the_same(tmp_path: Path) -> None:
    """Keys that transformers wrote before version 5: rope_theta and rope_scaling apart, torch_dtype."""
    save_tiny("llama", tmp_path / "new")
    spec = import_checkpoint(tmp_path / "new", tmp_path / "first")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    older = config | {"rope_theta": theta, "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    (tmp_path / "new" / "config.json").write_text(json.dumps(older))
    assert import_checkpoint(tmp_path / "new", tmp_path / "second") == spec


def test_descriptions_know_every_tensor_of_their_family() -> None:
    for family in FAMILIES:
        from brigata.model.huggingface.convert import describe_config

        _, spec = describe_config(
            {k: v for k, v in tiny_config(family).to_diff_dict().items() if k != "dtype"}
        )
        held = {name for entry in FAMILIES[family].entries(spec) for name in entry.ours}
        assert held == tensor_shapes(spec).keys(), family


def test_the_description_survives_its_file(trip: Trip) -> None:
    assert read_spec(trip.ours) == trip.spec

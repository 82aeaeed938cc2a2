"""Checkpoints of ours: what is written is read, in any layout, and training leaves one behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from brigata.describe import JobError, ModelSpec, parse_job
from brigata.model.checkpoint import (
    load_model,
    open_checkpoint,
    read_spec,
    spec_to_toml,
    tensor_shapes,
    write_checkpoint,
)
from brigata.model.initial import initial_value
from equivalence import train_steps
from pool import Pool
from test_families import FAMILIES


def spec_of(family: str) -> ModelSpec:
    return ModelSpec.model_validate(
        {"hidden": 32, "heads": 8, "kv_heads": 4, "ffn": 48, "vocab": 256} | FAMILIES[family]
    )


def tensors(spec: ModelSpec, seed: int = 7) -> list[tuple[str, Tensor]]:
    shapes = tensor_shapes(spec).items()
    return [(n, initial_value(n, torch.Size(s), spec, seed, torch.float64)) for n, s in shapes]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_read(family: str, tmp_path: Path) -> None:
    spec = spec_of(family)
    write_checkpoint(tmp_path / "c", spec, tensors(spec), shard_bytes=10_000)
    assert read_spec(tmp_path / "c") == spec
    with open_checkpoint(tmp_path / "c") as found:
        for name, value in tensors(spec):
            assert torch.equal(found.load(name), value), name
    model = load_model(tmp_path / "c", torch.float64)
    assert torch.isfinite(model(torch.arange(12)[None])).all()


def job(folder: Path, layout: dict[str, Any]) -> Any:
    return parse_job({
        "version": 1, "model": {"path": str(folder)}, "layout": layout,
        "workload": {"seq_len": 12, "global_batch": 8, "micro_batch": 2},
        "train": {"steps": 3, "precision": "fp64", "clip": 0.05, "lr": 0.01},
    })  # fmt: skip


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "zero": 3}, {"tp": 2, "dp": 2, "zero": 2}], ids=str)
def test_every_layout_starts_from_the_same_weights(
    pool: Pool, tmp_path: Path, layout: dict[str, Any]
) -> None:
    spec = spec_of("hybrid")
    write_checkpoint(tmp_path / "c", spec, tensors(spec))
    reference = pool.run(1, train_steps, job(tmp_path / "c", {}))[0]
    fresh = pool.run(1, train_steps, job(tmp_path / "c", {}).model_copy(update={"model": spec}))[0]
    assert abs(float(reference["losses"][0] - fresh["losses"][0])) > 1e-4  # not the initial values
    request = job(tmp_path / "c", layout)
    for result in pool.run(request.ranks, train_steps, request):
        torch.testing.assert_close(result["losses"], reference["losses"], rtol=1e-10, atol=0)


def test_a_run_leaves_a_checkpoint_that_a_run_starts_from(tmp_path: Path) -> None:
    """Two steps on 2 ranks, then 0 learning on 1 rank from what they left: the held-out loss is the same."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i}.txt").write_text(f"line {i} of some text that is long enough to learn from\n" * 20)
    first = {
        "version": 1,
        "model": {"pattern": "M*-", "hidden": 32, "heads": 4, "mamba": {"heads": 4, "state": 8}},
        "workload": {"seq_len": 32, "global_batch": 4}, "layout": {"tp": 2},
        "train": {"steps": 2, "data": str(text), "held_out_tokens": 512, "sample_tokens": 2},
    }  # fmt: skip
    run(first, tmp_path / "first")
    second = first | {"model": {"path": str(tmp_path / "first" / "checkpoint")}, "layout": {"tp": 1}}
    second["train"] = first["train"] | {"lr": 1e-12, "steps": 1}  # type: ignore[operator]
    run(second, tmp_path / "second")
    losses = [
        json.loads((tmp_path / n / "summary.json").read_text())["held_out_loss"] for n in ("first", "second")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def run(data: dict[str, Any], out: Path) -> None:
    code = (
        "import json, sys; from pathlib import Path; from brigata.describe import parse_job\n"
        "from brigata.train.launch import launch\n"
        "if __name__ == '__main__': launch(parse_job(json.loads(sys.argv[1])), sys.argv[2])"
    )
    script = out.with_suffix(".py")
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script, json.dumps(data), str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_descriptions_leave_out_defaults(tmp_path: Path) -> None:
    assert spec_to_toml(spec_of("mamba")).splitlines()[0] == 'pattern = "M3"'
    assert "norm_eps" not in spec_to_toml(spec_of("mamba"))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"path": "nowhere"}, "name the folder of a checkpoint"),
        ({"path": "{folder}", "hidden": 64}, "model.hidden = 64 does not go with model.path"),
        ({"path": "{folder}", "preset": "llama3-8b"}, "model.preset"),
    ],
)
def test_paths_that_do_not_do_are_refused(tmp_path: Path, model: dict[str, Any], words: str) -> None:
    spec = spec_of("qwen")
    write_checkpoint(tmp_path / "c", spec, tensors(spec))
    filled = {k: str(tmp_path / "c") if v == "{folder}" else v for k, v in model.items()}
    with pytest.raises(JobError) as refusal:
        parse_job(
            {"version": 1, "model": filled, "workload": {"seq_len": 8, "global_batch": 1}, "layout": {}}
        )
    assert any(words in sentence for sentence in refusal.value.refusals)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    spec = spec_of("qwen")
    write_checkpoint(tmp_path / "c", spec, tensors(spec)[1:])
    with pytest.raises(JobError, match=r"embed.weight.*is missing"), open_checkpoint(tmp_path / "c"):
        pass

"""Import and export of whole checkpoints, one tensor at a time."""

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from brigata.describe.errors import JobError, one_of, refusals_from_pydantic
from brigata.describe.model import ModelSpec
from brigata.model.checkpoint import (
    SOURCE_CONFIG,
    carry_along,
    open_checkpoint,
    read_spec,
    tensor_shapes,
    write_checkpoint,
)
from brigata.model.huggingface.config import Config
from brigata.model.huggingface.entries import by_ours, foreign_shapes, load_foreign, load_ours
from brigata.model.huggingface.families import FAMILIES
from brigata.model.tensor_files import SHARD_BYTES, TensorFolder, compare_names, write_tensors

Progress = Callable[[str, int], None]
"""Called with a tensor's name and the number of all, as each is done."""
TENSORS_AT_HAND = 4
"""Tensors of all experts that are kept while their parts are written."""
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float64": "float64"}


def read_config(folder: Path) -> tuple[str, ModelSpec]:
    """Family and description of the foreign checkpoint in ``folder``.

    Raises:
        JobError: it is none, of an unknown family, or has a setting that is not supported.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise JobError(f"{str(folder)!r} is not there; name the folder of a checkpoint")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"{str(path)!r}: {error.strerror}; name a folder with a config.json") from None
    except ValueError as error:
        raise JobError(f"{str(path)!r} is not valid JSON: {error}") from None
    return describe_config(data)


def describe_config(data: dict[str, Any]) -> tuple[str, ModelSpec]:
    """Family and description from the content of a config.json.

    Raises:
        JobError: as for ``read_config``.
    """
    family = data.get("model_type")
    if family not in FAMILIES:
        raise JobError(f"config.json: model_type = {family!r} cannot be read; {one_of(FAMILIES)} can")
    config = Config(data, family)
    config.only("quantization_config", None)
    found = FAMILIES[family].read(config)
    config.finish()
    found = {key: value for key, value in found.items() if value is not None}
    try:
        return family, ModelSpec.model_validate(found)
    except ValidationError as error:
        raise JobError(
            *(f"config.json: {words}" for words in refusals_from_pydantic(error, ModelSpec))
        ) from None


def import_checkpoint(source: Path, folder: Path, progress: Progress | None = None) -> ModelSpec:
    """Make our checkpoint in ``folder`` of the foreign one in ``source``; values keep their dtype.

    Memory holds one tensor, and one shard that is being written.

    Raises:
        JobError: something cannot be read, is missing, unknown or of another shape; ``folder`` is not empty.
    """
    family, spec = read_config(source)
    refuse_filled(folder)
    entries, shapes = list(FAMILIES[family].entries(spec)), tensor_shapes(spec)
    with TensorFolder(source) as tensors:
        found = tensors.shapes()
        expected = foreign_shapes(entries, shapes)
        for extra in sorted(found.keys() - expected.keys()):
            if _may_be_left(extra, spec):
                del found[extra]
        compare_names(found, expected, repr(str(source)))
        held = by_ours(entries)

        def ours() -> Iterator[tuple[str, Tensor]]:
            for name in shapes:
                yield name, load_ours(name, held, shapes, tensors.load)
                if progress is not None:
                    progress(name, len(shapes))

        write_checkpoint(folder, spec, ours())
    carry_along(source, folder, {"config.json": SOURCE_CONFIG})
    return spec


def _may_be_left(name: str, spec: ModelSpec) -> bool:
    """Tensors that some files hold beside the model: a tied head, tables that follow from the shape."""
    tied = spec.tie_embeddings and name == "lm_head.weight"
    return tied or name.endswith(("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))


def export_checkpoint(
    folder: Path,
    target: Path,
    family: str | None = None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write the checkpoint in ``folder`` as a foreign one into ``target``, which is made.

    Args:
        folder: ours.
        target: not there or empty.
        family: ``model_type`` to write; default: that of its source, or the one that its shape fits.
        progress: see ``Progress``.
        shard_bytes: of one file at most.

    Returns:
        The family.

    Raises:
        JobError: the description does not fit the family, or any; something is missing.
    """
    spec = read_spec(folder)
    refuse_filled(target)
    original = _original_config(folder)
    family = _family_for(spec, family or original.get("model_type"))
    entries = list(FAMILIES[family].entries(spec))
    target.mkdir(parents=True, exist_ok=True)
    with open_checkpoint(folder) as tensors:
        load = lru_cache(maxsize=TENSORS_AT_HAND)(tensors.load)
        dtype = str(load(entries[0].ours[0]).dtype).removeprefix("torch.")

        def foreign() -> Iterator[tuple[str, Tensor]]:
            for entry in entries:
                yield entry.foreign, load_foreign(entry, load)
                if progress is not None:
                    progress(entry.foreign, len(entries))

        write_tensors(target, foreign(), shard_bytes=shard_bytes)
    kept = original if original.get("model_type") == family else {}
    head = {"model_type": family, "architectures": [FAMILIES[family].architecture], "dtype": dtype}
    config = {**kept, **FAMILIES[family].write(spec), **head}
    for older in (
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
        "torch_dtype",
        "hybrid_override_pattern",
    ):
        config.pop(older, None)
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    carry_along(folder, target)
    return family


def _original_config(folder: Path) -> dict[str, Any]:
    path = folder / SOURCE_CONFIG
    if not path.is_file():
        return {}
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def _family_for(spec: ModelSpec, wanted: str | None) -> str:
    """The family whose config.json describes just this model.

    Raises:
        JobError: there is none, or ``wanted`` is not one.
    """
    if wanted is not None and wanted not in FAMILIES:
        raise JobError(f"--family {wanted!r} is not known; use {one_of(FAMILIES)}")
    fitting = [name for name in ([wanted] if wanted else FAMILIES) if describes(name, spec)]
    if not fitting:
        what = (
            f"--family {wanted!r} cannot" if wanted else "no family of Hugging Face's that is known here can"
        )
        raise JobError(f"{what} describe this model; its checkpoint can be used here as it is")
    return fitting[0]


def describes(family: str, spec: ModelSpec) -> bool:
    """Whether ``spec`` written as ``family`` and read again is the same model."""
    try:
        data = FAMILIES[family].write(spec) | {"model_type": family}
        _, again = describe_config(data)
    except (JobError, AssertionError, ZeroDivisionError):
        return False
    return _computed(again) == _computed(spec)


def _computed(spec: ModelSpec) -> dict[str, Any]:
    """What changes a model's tensors or results: without defaults that are merely written out."""
    data = spec.model_dump(exclude={"preset", "max_positions"})
    if spec.positions == "learned":
        data["max_positions"] = spec.max_positions
    if not spec.has_attention:
        for key in ("heads", "kv_heads", "head_dim", "rope_theta", "rotary_dim"):
            data.pop(key)
    if spec.positions != "rope":
        data.pop("rope_theta", None)
    if "-" not in spec.pattern:
        data.pop("ffn")
    data["attention_scale"] = round((spec.attention_scale or max(spec.head_dim, 1) ** -0.5) ** -2, 6)
    data["rotary_dim"] = spec.rotary_dim or spec.head_dim
    if spec.mamba is not None:
        data["mamba"] |= {"chunk": None, "norm_groups": spec.mamba.normalised_groups}
    if spec.experts is not None:
        data["experts"] |= {"aux_loss": None, "balance_rate": None}
    return data


def refuse_filled(folder: Path) -> None:
    """Refuse to write into a folder that has something in it.

    Raises:
        JobError: it has.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise JobError(f"{str(folder)!r} is there already and not empty; name another folder")

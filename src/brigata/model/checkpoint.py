"""Our own checkpoint: a folder with the model's description, its weights and its tokenizer.

::

    model.toml                    the description, defaults left out
    model.safetensors, or shards  parameters and buffers by their global names
    tokenizer.json, ...           carried along from where the model came from
    huggingface.json              the config.json it came with, if any: ``export`` keeps its other keys
"""

import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from brigata.describe.errors import JobError, refusals_from_pydantic
from brigata.describe.model import SPEC_FILE, ModelSpec
from brigata.describe.pattern import contract_pattern
from brigata.model.decoder import Decoder, build_decoder
from brigata.model.tensor_files import TensorFolder, TensorSource, compare_names, write_tensors

SOURCE_CONFIG = "huggingface.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files that travel with a model as they are."""


def spec_to_toml(spec: ModelSpec) -> str:
    """The description as TOML: pattern contracted, what equals its default left out."""
    data = spec.model_dump(exclude_defaults=True, exclude_none=True)
    data["pattern"] = contract_pattern(spec.pattern)
    for key in ("preset", "path"):
        data.pop(key, None)
    sections = {key: value for key, value in data.items() if isinstance(value, dict)}
    lines = [f"{key} = {_toml(value)}" for key, value in data.items() if key not in sections]
    for name, section in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case list() | tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case _:
            return repr(value)


def read_spec(folder: Path) -> ModelSpec:
    """The description of the checkpoint in ``folder``.

    Raises:
        JobError: it is not there or cannot be read.
    """
    path = folder / SPEC_FILE
    if not folder.is_dir():
        raise JobError(f"{str(folder)!r} is not there; name the folder of a checkpoint")
    if not path.is_file():
        hint = "; `brigata convert import` makes one of it" if (folder / "config.json").is_file() else ""
        raise JobError(f"{str(folder)!r} has no {SPEC_FILE}: it is no checkpoint of ours{hint}")
    try:
        return ModelSpec.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{str(path)!r} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise JobError(
            *(f"{str(path)!r}: {words}" for words in refusals_from_pydantic(error, ModelSpec))
        ) from None


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter (tied ones once, under the embedding's name) and kept buffer."""
    model = build_decoder(spec)
    kept = model.state_dict()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return shapes | {name: tuple(b.shape) for name, b in model.named_buffers() if name in kept}


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[TensorSource]:
    """The weights of the checkpoint in ``folder``, proven to be those of its description.

    Raises:
        JobError: there are none, or some are missing, unknown or of another shape.
    """
    with TensorFolder(folder) as tensors:
        compare_names(tensors.shapes(), tensor_shapes(read_spec(folder)), repr(str(folder)))
        yield tensors


def write_checkpoint(
    folder: Path, spec: ModelSpec, tensors: Iterable[tuple[str, Tensor]], **shards: int
) -> None:
    """Write description and weights into ``folder``, which is made.

    ``tensors``: every name of ``tensor_shapes``, whole, one after the other; ``shards``: ``shard_bytes``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, tensors, **shards)  # type: ignore[arg-type]
    (folder / SPEC_FILE).write_text(spec_to_toml(spec), encoding="utf-8")


def load_model(
    folder: Path, dtype: torch.dtype = torch.float32, master: torch.dtype | None = None
) -> Decoder:
    """The whole model of the checkpoint in ``folder``, on the CPU, in evaluation.

    ``dtype``: of the products; ``master``: of the parameters, default ``dtype``.

    Raises:
        JobError: as for ``open_checkpoint``.
    """
    spec = read_spec(folder)
    model = build_decoder(spec, dtype).to(master or dtype)
    model.to_empty(device="cpu")
    if spec.tie_embeddings:
        model.head_loss.weight = model.embed.weight
    with open_checkpoint(folder) as tensors, torch.no_grad():
        kept = tensors.shapes()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in kept:
                tensor.copy_(tensors.load(name))
            else:
                tensor.zero_()  # a count of the step that has not begun
    return model.eval()


def carry_along(source: Path, folder: Path, names: Mapping[str, str] | None = None) -> list[str]:
    """Copy tokenizer files from one folder to another; the names of those that were there.

    ``names``: further files, with their names in ``folder``.
    """
    copied = []
    for name, target in {**dict.fromkeys(TOKENIZER_FILES), **(names or {})}.items():
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / (target or name))
            copied.append(name)
    return copied

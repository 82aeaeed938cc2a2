"""Tensors in safetensors files: a folder of them read one tensor at a time, or written shard by shard."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from brigata.describe.errors import JobError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 4 * 2**30
"""Bytes of one file at most, unless a single tensor is larger."""


class TensorSource(Protocol):
    """Named tensors that are loaded when they are asked for."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's name and shape."""
        ...

    def load(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        ...


class TensorFolder:
    """The safetensors files of a folder, as Hugging Face lays them out: one file, or shards with an index.

    Nothing in them is ever executed, and nothing outside the folder is read. Use it as a context: it keeps
    its files open.

    Raises:
        JobError: there are none, or the index names what is not there or lies elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        for file in _files(folder):
            try:
                opened = self._stack.enter_context(safe_open(folder / file, framework="pt"))
            except SafetensorError as error:
                raise JobError(f"{str(folder / file)!r} is no safetensors file: {error}") from None
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def load(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def _files(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        try:
            names = sorted(
                set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError) as error:
            raise JobError(f"{str(folder / INDEX)!r} is no index of safetensors files: {error}") from None
        for name in names:
            if Path(name).name != name:
                raise JobError(f"{str(folder / INDEX)!r} names {name!r}, which is not a file of its folder")
            if not (folder / name).is_file():
                raise JobError(f"{str(folder / INDEX)!r} names {name!r}, which is not there; copy it too")
        return names
    if (folder / SINGLE).is_file():
        return [SINGLE]
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(
        p.name for p in folder.glob("*.pt*")
    )
    if pickles:
        raise JobError(
            f"{str(folder)!r} has its weights in {pickles[0]!r}, a pickle, and opening one can run anything; "
            "convert it to safetensors first"
        )
    raise JobError(f"{str(folder)!r} has no {SINGLE} and no {INDEX}; name a folder with safetensors files")


def write_tensors(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``tensors`` as they come; no more than one shard is in memory.

    One shard becomes ``model.safetensors``; several are numbered and get an index, as Hugging Face has them.
    """
    shards: list[tuple[Path, list[str]]] = []
    total = 0
    for batch in _batches(tensors, shard_bytes):
        path = folder / f"shard-{len(shards)}.partial"
        save_file(batch, path, metadata=dict(metadata or {"format": "pt"}))
        shards.append((path, list(batch)))
        total += sum(tensor.nbytes for tensor in batch.values())
    if len(shards) == 1:
        shards[0][0].rename(folder / SINGLE)
        return
    weight_map = {}
    for i, (path, names) in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _batches(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if batch and held + tensor.nbytes > shard_bytes:
            yield batch
            batch, held = {}, 0
        batch[name] = tensor.detach().to("cpu", copy=False).contiguous()
        held += tensor.nbytes
    yield batch or {"empty": torch.empty(0)}


def compare_names(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Refuse tensors that are missing, too many or of another shape.

    Raises:
        JobError: one sentence a tensor, 20 at most.
    """
    wrong = [f"{what}: tensor {name!r} {list(expected[name])} is missing" for name in expected.keys() - found]
    wrong += [
        f"{what}: tensor {name!r} {list(found[name])} is not part of the model"
        for name in found.keys() - expected
    ]
    wrong += [
        f"{what}: tensor {name!r} is {list(found[name])}, and the model's is {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        more = [f"{what}: and {len(wrong) - 20} more"] if len(wrong) > 20 else []
        raise JobError(*sorted(wrong)[:20], *more)

"""Which foreign tensor holds which of ours, as data, and both ways between them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Load = Callable[[str], Tensor]
Form = Literal["plain", "transposed", "convolution"]


@dataclass(frozen=True)
class Entry:
    """One foreign tensor and ours that lie in it.

    Attributes:
        foreign: its name.
        ours: names of ours; several lie one after the other by rows.
        form: how ours, put together, become the foreign one: ``plain``; ``transposed`` (the last two dims);
            ``convolution`` (a dim of size 1 stands before the last).
        expert: the foreign tensor is this expert's part of ours, which hold all experts; None: it is all.
    """

    foreign: str
    ours: tuple[str, ...]
    form: Form = "plain"
    expert: int | None = None


def foreign_shapes(
    entries: Iterable[Entry], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Shape of every foreign tensor, from those of ours."""
    found = {}
    for entry in entries:
        parts = [shapes[name][(0 if entry.expert is None else 1) :] for name in entry.ours]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        found[entry.foreign] = _formed(shape, entry.form)
    return found


def _formed(shape: tuple[int, ...], form: Form) -> tuple[int, ...]:
    match form:
        case "transposed":
            return (*shape[:-2], shape[-1], shape[-2])
        case "convolution":
            return (*shape[:-1], 1, shape[-1])
        case "plain":
            return shape


def load_ours(
    name: str, entries: Mapping[str, list[Entry]], shapes: Mapping[str, tuple[int, ...]], load: Load
) -> Tensor:
    """One of our tensors from the foreign ones that hold it.

    Args:
        name: of ours.
        entries: for each of ours, where it lies: one entry, or one an expert.
        shapes: of ours.
        load: gives a foreign tensor by its name.
    """
    parts = []
    for entry in entries[name]:
        whole = load(entry.foreign)
        if entry.form == "transposed":
            whole = whole.transpose(-1, -2)
        elif entry.form == "convolution":
            whole = whole.squeeze(-2)
        rows = [shapes[other][0 if entry.expert is None else 1] for other in entry.ours]
        start = sum(rows[: entry.ours.index(name)])
        parts.append(whole[start : start + rows[entry.ours.index(name)]])
    if entries[name][0].expert is None:
        return parts[0].contiguous()
    return torch.stack(parts)


def load_foreign(entry: Entry, load: Load) -> Tensor:
    """One foreign tensor from ours; ``load`` gives one of ours by its name."""
    parts = [load(name) if entry.expert is None else load(name)[entry.expert] for name in entry.ours]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if entry.form == "transposed":
        whole = whole.transpose(-1, -2)
    elif entry.form == "convolution":
        whole = whole.unsqueeze(-2)
    return whole.contiguous()


def by_ours(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """For each of our tensors, the entries that hold it, experts in order."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        for name in entry.ours:
            found.setdefault(name, []).append(entry)
    for held in found.values():
        held.sort(key=lambda entry: entry.expert or 0)
    return found

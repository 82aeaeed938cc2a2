"""Shapes of public models, by name, read from the TOML files beside this one when they are first asked for.

A table of a file is a preset: keys of ``[model]``, and

* ``source``: whose published ``config.json`` (or paper) the shape is from;
* ``published_b``: the published number of parameters, in billions, where it is the check;
* ``like``: another preset of the file, whose other keys hold here too.
"""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

FACTS = ("source", "published_b", "like")
"""Keys that say something about a preset and are none of ``[model]``."""


@cache
def _files() -> dict[str, dict[str, Any]]:
    """All presets with their facts, in the order of file names and of each file."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(resources.files(__package__).iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            for name, table in tomllib.loads(file.read_text(encoding="utf-8")).items():
                base = {
                    key: value
                    for key, value in found.get(table.get("like", ""), {}).items()
                    if key not in FACTS
                }
                assert name not in found, name
                found[name] = merged(base, table)
    return found


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the keys of ``over``; sections of both are merged key by key."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = (
            merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return result


class _Presets(Mapping[str, dict[str, Any]]):
    """Name -> keys of ``[model]``."""

    def __getitem__(self, name: str) -> dict[str, Any]:
        return {key: value for key, value in _files()[name].items() if key not in FACTS}

    def __iter__(self) -> Iterator[str]:
        return iter(_files())

    def __len__(self) -> int:
        return len(_files())


MODEL_PRESETS: Mapping[str, dict[str, Any]] = _Presets()
"""Name -> keys of ``[model]``."""


def preset_source(name: str) -> str:
    """Where a preset's shape is published."""
    return str(_files()[name]["source"])


def published_billions(name: str) -> float | None:
    """The published number of parameters in billions, where there is one to check against."""
    value = _files()[name].get("published_b")
    return None if value is None else float(value)

"""The text a model learns from: bytes of whole files, a twentieth of them held out."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from brigata.describe.errors import JobError

SEPARATOR = b"\n\n"
"""Stands between two files; text like any other, no token of its own."""
HELD_OUT_ONE_IN = 20
"""One file in so many is held out."""
NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
)
"""Folders under the standard library's that are left out of the default text."""


@dataclass(frozen=True)
class Corpus:
    """Tokens to learn from and tokens to be judged by; no file is on both sides unless one had to be cut."""

    train: NDArray[np.integer]
    """Training tokens (N,), one a byte until a tokenizer has been at work."""
    held_out: NDArray[np.integer]
    """Held-out tokens (M,), likewise."""
    source: str
    """What the text is, how many files, how much (MB), for people."""


@dataclass(frozen=True)
class _File:
    path: str
    """Relative to the folder that was named, with forward slashes: the same wherever the folder lies."""
    text: bytes


def load_corpus(data: str | list[str] | None, seq_len: int) -> Corpus:
    """Read the text that ``train.data`` names and split it.

    Folders are walked: text files in the order of their relative paths, without binary and hidden ones and
    without links (what a link inside the folder leads to is read where it lies). Exact copies of a file are
    read once, so that none is trained on and held out. The split hashes relative paths: it is the same on
    every rank and every machine. Where whole files make no sensible split, the end of the text is held out.

    Args:
        data: a folder or file, a list of them, or None for the Python standard library's own sources.
        seq_len: length of a sequence (tokens); each side holds at least ``seq_len + 1`` tokens.

    Raises:
        JobError: something named cannot be read or is no text, or there is too little text.
    """
    if data is None:
        source = f"the Python {platform.python_version()} standard library's own sources"
        files, binary = _read_stdlib(), 0
    else:
        source = repr(data) if isinstance(data, str) else ", ".join(map(repr, data))
        files, binary = _read_named([data] if isinstance(data, str) else data)
    files = _without_copies(files)
    train, held_out = _split(files, seq_len, "(the default)" if data is None else f"= {data!r}")
    megabytes = (len(train) + len(held_out)) / 1e6
    size = f"{len(files)} {'file' if len(files) == 1 else 'files'}, {megabytes:.2f} MB"
    skipped = f" ({binary} binary left out)" if binary else ""
    tokens = np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8)
    return Corpus(*tokens, source=f"{source}: {size}{skipped}")


def _without_copies(files: list[_File]) -> list[_File]:
    first: dict[bytes, _File] = {}
    for file in files:
        first.setdefault(file.text, file)
    return [file for file in first.values() if file.text]


def _split(files: list[_File], seq_len: int, value: str) -> tuple[bytes, bytes]:
    """Training text and held-out text, of ``seq_len + 1`` bytes or more each."""
    least = seq_len + 1
    train = SEPARATOR.join(file.text for file in files if not _is_held_out(file.path))
    held_out = SEPARATOR.join(file.text for file in files if _is_held_out(file.path))
    # A few files of unequal size can split badly: never train on the smaller part.
    if len(train) >= max(least, len(held_out)) and len(held_out) >= least:
        return train, held_out
    whole = SEPARATOR.join(file.text for file in files)
    if len(whole) < 2 * least:
        shorter = len(whole) // 2 - 1
        shorten = f", or use workload.seq_len = {shorter} or less" if shorter > 0 else ""
        raise JobError(
            f"train.data {value} has {len(whole)} bytes of text; workload.seq_len = {seq_len} needs at least "
            f"{2 * least}, a training and a held-out sequence: name more text{shorten}"
        )
    cut = len(whole) - max(len(whole) // HELD_OUT_ONE_IN, least)
    return whole[:cut], whole[cut:]


def _is_held_out(path: str) -> bool:
    digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def _read_stdlib() -> list[_File]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(_walk(root, skip=NOT_STDLIB)):
        if path.endswith(".py") and _is_text(text := (root / path).read_bytes()):
            files.append(_File(path, text))
    return files


def _read_named(names: list[str]) -> tuple[list[_File], int]:
    """Files in the order of ``names``, and the number of binary ones that were met on the way."""
    files, binary = [], 0
    for name in names:
        root = Path(name)
        try:
            walked = root.is_dir()
            for path in sorted(_walk(root)) if walked else [root.name]:
                text = (root / path if walked else root).read_bytes()
                if _is_text(text):
                    files.append(_File(path, text))
                elif walked:
                    binary += 1
                else:
                    raise JobError(
                        f"train.data = {name!r} is no UTF-8 text; name a text file or a folder of them"
                    )
        except OSError as error:
            reason = f"{error.strerror} ({error.filename})"
            raise JobError(f"train.data = {name!r} cannot be read: {reason}; name readable text") from None
    return files, binary


def _walk(root: Path, below: str = "", skip: frozenset[str] = frozenset()) -> Iterator[str]:
    """Relative paths of the regular files below ``root``, hidden ones and links left out."""
    with os.scandir(root / below) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name in skip:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(root, f"{below}{entry.name}/", skip)
            elif entry.is_file(follow_symlinks=False):
                yield below + entry.name


def _is_text(content: bytes) -> bool:
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True

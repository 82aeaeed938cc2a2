"""Text to tokens and back: bytes, or any tokenizer that Hugging Face's ``tokenizers`` reads."""

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from brigata.describe.errors import JobError
from brigata.describe.job import Job
from brigata.train.corpus import Corpus

PIECE_BYTES = 1 << 20
"""Text is tokenised in pieces of about so much, cut between lines."""


class Tokenizer(Protocol):
    """What training and generation ask of a tokenizer."""

    name: str
    """For people: ``bytes``, or the file."""
    unit: str
    """What one token is called: ``byte`` or ``token``."""

    @property
    def size(self) -> int:
        """Number of tokens; ids lie below it."""
        ...

    def encode(self, text: bytes) -> NDArray[np.integer]:
        """Tokens (N,) of UTF-8 text."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens; what is no text is replaced."""
        ...


class ByteTokenizer:
    """One token a byte."""

    name = "bytes"
    unit = "byte"
    size = 256

    def encode(self, text: bytes) -> NDArray[np.integer]:
        """Bytes (N,) as they are, read-only."""
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: list[int]) -> str:
        """UTF-8 text; tokens beyond 255 stand for nothing."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer:
    """A ``tokenizer.json``.

    Raises:
        JobError: the file cannot be read.
    """

    unit = "token"

    def __init__(self, path: Path) -> None:
        self.name, self.path = str(path), path
        _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer as Loaded

        try:
            return Loaded.from_str(self.path.read_text(encoding="utf-8"))
        except OSError as error:
            raise JobError(
                f"train.tokenizer = {self.name!r}: {error.strerror}; name a tokenizer.json"
            ) from None
        except Exception as error:  # the library raises nothing more precise
            raise JobError(f"train.tokenizer = {self.name!r} is no tokenizer.json: {error}") from None

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: bytes) -> NDArray[np.integer]:
        """Tokens (N,) int32, without the special ones that mark begin and end."""
        pieces = _pieces(text.decode(errors="ignore"))
        encoded = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return np.concatenate([np.array(piece.ids, np.int32) for piece in encoded] or [np.empty(0, np.int32)])

    def decode(self, tokens: list[int]) -> str:
        """Text, special tokens left out."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def _pieces(text: str) -> list[str]:
    """Cuts after an empty line, so that no token is cut in two."""
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n\n", start + PIECE_BYTES)
        end = len(text) if end < 0 else end + 2
        pieces.append(text[start:end])
        start = end
    return pieces


def tokenizer_path(job: Job) -> Path | None:
    """The ``tokenizer.json`` that a job names, or that lies in its checkpoint; None: bytes."""
    named = job.train.tokenizer
    if named == "bytes":
        return None
    if named is not None:
        return Path(named)
    beside = None if job.model.path is None else Path(job.model.path) / "tokenizer.json"
    return beside if beside is not None and beside.is_file() else None


def tokenize(corpus: Corpus, tokenizer: Tokenizer, seq_len: int) -> Corpus:
    """The corpus in tokens of ``tokenizer``; bytes stay as they are.

    Raises:
        JobError: a side has less than a sequence of ``seq_len + 1`` tokens.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return corpus
    train, held_out = (tokenizer.encode(side.tobytes()) for side in (corpus.train, corpus.held_out))
    shortest = min(len(train), len(held_out))
    if shortest <= seq_len:
        raise JobError(
            f"train.data has {shortest} tokens of {tokenizer.name!r} on its shorter side; workload.seq_len = "
            f"{seq_len} needs {seq_len + 1}: name more text, or use workload.seq_len = {max(shortest - 1, 1)}"
        )
    counted = f"{corpus.source}, {(len(train) + len(held_out)) / 1e6:.2f} M tokens"
    return Corpus(train, held_out, counted)


def load_tokenizer(job: Job) -> Tokenizer:
    """The job's tokenizer.

    Raises:
        JobError: it cannot be read, or has more tokens than the model.
    """
    path = tokenizer_path(job)
    tokenizer: Tokenizer = ByteTokenizer() if path is None else FileTokenizer(path)
    if tokenizer.size > job.model.vocab:
        raise JobError(
            f"train.tokenizer = {tokenizer.name!r} has {tokenizer.size:,} tokens, and model.vocab = "
            f"{job.model.vocab:,} cannot hold them; use model.vocab = {tokenizer.size} or another tokenizer"
        )
    return tokenizer

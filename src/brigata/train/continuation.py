"""Text continued by a checkpoint in one process."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from brigata.describe.errors import JobError, one_of
from brigata.model.checkpoint import SOURCE_CONFIG, load_model
from brigata.model.decoder import Decoder
from brigata.model.generate import generate_cached
from brigata.train.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class Continuation:
    """A model, its tokenizer and the tokens that end a text.

    Attributes:
        made: tokens made by the last ``stream``.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, stop: frozenset[int]) -> None:
        self.model, self.tokenizer, self.stop = model, tokenizer, stop
        self.made = 0

    @classmethod
    def open(cls, folder: Path, precision: str = "fp32") -> "Continuation":
        """From the checkpoint in ``folder``.

        Raises:
            JobError: it is none, or ``precision`` is not one of ``PRECISIONS``.
        """
        if precision not in PRECISIONS:
            raise JobError(f"--precision {precision!r} is not known; use {one_of(PRECISIONS)}")
        dtype = PRECISIONS[precision]
        model = load_model(folder, dtype)
        path = folder / "tokenizer.json"
        tokenizer: Tokenizer = FileTokenizer(path) if path.is_file() else ByteTokenizer()
        return cls(model, tokenizer, _end_tokens(folder))

    def stream(
        self, prompt: str, tokens: int, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
    ) -> Iterator[str]:
        """Pieces of text as they are known: a piece may hold several tokens where one alone is no text.

        Raises:
            JobError: an argument is out of its range.
        """
        encoded = [int(token) for token in self.tokenizer.encode(prompt.encode())]
        try:
            made = generate_cached(
                self.model, encoded, tokens, temperature=temperature, top_p=top_p, seed=seed, stop=self.stop
            )
        except ValueError as error:
            raise JobError(str(error)) from None
        return self._decode(encoded, made)

    def _decode(self, prompt: list[int], made: Iterator[int]) -> Iterator[str]:
        """What each token adds to the text of all: spaces depend on what stands before."""
        known, shown = list(prompt), self.tokenizer.decode(prompt)
        self.made = 0
        for token in made:
            self.made += 1
            known.append(token)
            text = self.tokenizer.decode(known)
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text
        rest = self.tokenizer.decode(known)
        if rest != shown:
            yield rest[len(shown) :]


def _end_tokens(folder: Path) -> frozenset[int]:
    """``eos_token_id`` of the files that a model came with."""
    for name in ("generation_config.json", SOURCE_CONFIG):
        path = folder / name
        if path.is_file():
            end = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if end is not None:
                return frozenset([end] if isinstance(end, int) else end)
    return frozenset()

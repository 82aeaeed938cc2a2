"""Text from a model, one token after the other."""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from brigata.model.decoder import Decoder
from brigata.model.sequences import Cache

NextLogits = Callable[[Tensor], Tensor]
"""tokens (1, length) -> logits (length, vocab): the whole vocabulary, whatever the layout."""


@torch.no_grad()
def generate(
    logits: NextLogits, prompt: Sequence[int], length: int, window: int, seed: int, temperature: float = 0.8
) -> list[int]:
    """Sample ``length`` tokens after ``prompt``.

    The model reads a window of constant size, filled from the left: attention is causal, so what stands to
    the right of a token cannot change its prediction. Every rank draws the same numbers and so the same
    tokens.
    """
    tokens = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(length):
        context = tokens[-window:]
        padded = torch.zeros(1, window, dtype=torch.int64)
        padded[0, : len(context)] = torch.tensor(context)
        row = logits(padded)[len(context) - 1].double().cpu()
        probabilities = (row / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens


def generate_cached(
    model: Decoder,
    prompt: Sequence[int],
    length: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Up to ``length`` tokens after ``prompt``, each as soon as it is known; one process, with a cache.

    The prompt is read once; from then on every token costs one forward pass of one token.

    Args:
        model: whole, on one device; runs as in evaluation, whatever its mode.
        prompt: one token or more.
        length: most tokens that are made.
        temperature: divides the logits before tokens are drawn; 0: always the likeliest token.
        top_p: tokens are drawn among the likeliest ones whose probabilities reach this sum
            (Holtzman et al., arXiv 1904.09751).
        seed: of the drawn tokens.
        stop: tokens that end the text; they are not yielded.

    Raises:
        ValueError: an argument is out of its range, or the text outgrows a learned table of positions.
    """
    _check_request(model, prompt, length, temperature, top_p)
    return _continue(model, prompt, length, temperature, top_p, seed, frozenset(stop))


def _check_request(
    model: Decoder, prompt: Sequence[int], length: int, temperature: float, top_p: float
) -> None:
    if not prompt:
        raise ValueError("the prompt has no tokens; give at least one")
    if length < 0:
        raise ValueError(f"length = {length} tokens cannot be made; use 0 or more")
    if temperature < 0:
        raise ValueError(f"temperature = {temperature} is below 0; use 0 for the likeliest token, or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p} is no share of the probability; use more than 0 and at most 1")
    rows = model.spec.max_positions if model.spec.positions == "learned" else None
    if rows is not None and len(prompt) + length - 1 > rows:
        raise ValueError(
            f"{len(prompt)} prompt tokens and {length} new ones go beyond model.max_positions = {rows}; "
            f"use a length of {max(0, rows - len(prompt) + 1)} or less"
        )


def _continue(
    model: Decoder,
    prompt: Sequence[int],
    length: int,
    temperature: float,
    top_p: float,
    seed: int,
    stop: frozenset[int],
) -> Iterator[int]:
    device = model.embed.weight.device
    generator = torch.Generator().manual_seed(seed)
    cache = Cache()
    tokens = list(prompt)
    for _ in range(length):
        row = _next_row(model, torch.tensor([tokens], device=device), cache)
        token = _pick(row, temperature, top_p, generator)
        if token in stop:
            return
        yield token
        tokens = [token]


@torch.no_grad()
def _next_row(model: Decoder, tokens: Tensor, cache: Cache) -> Tensor:
    """Logits (vocab,) of the next token in fp64, on the CPU; the model's mode is left as it was."""
    training = model.training
    model.eval()
    try:
        return model.next_logits(tokens, cache)[0].double().cpu()
    finally:
        model.train(training)


def _pick(row: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token by its logits (vocab,) fp64."""
    if temperature == 0:
        return int(row.argmax())
    probabilities, order = (row / temperature).softmax(-1).sort(descending=True, stable=True)
    ahead = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(ahead >= top_p, 0)
    return int(order[torch.multinomial(kept, 1, generator=generator)])

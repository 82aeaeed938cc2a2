"""Text from a model, one token after the other."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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

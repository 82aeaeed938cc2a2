"""Packed documents: several texts side by side in one sequence, each of which must not see the others."""

import torch
from torch import Tensor


def document_starts(documents: Tensor) -> Tensor:
    """The index, within its sequence, of the first token of each token's document.

    documents (count, length) int64, rising from left to right -> (count, length) int64. The position of
    a token within its document is its index minus this.
    """
    index = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(first, index, 0).cummax(1).values


def check_documents(documents: Tensor, shape: torch.Size) -> None:
    """Refuse documents that do not describe tokens of ``shape`` (count, length).

    Raises:
        ValueError: another shape, or numbers that fall from left to right.
    """
    if documents.shape != shape:
        raise ValueError(
            f"documents have the shape {tuple(documents.shape)} and the tokens {tuple(shape)}; "
            "give one document number a token"
        )
    if bool((documents[:, 1:] < documents[:, :-1]).any()):
        raise ValueError(
            "documents fall from left to right within a sequence; number them in the order of their tokens"
        )

"""The cut that an operator works on: chunks of tokens, or what each rank has for each rank."""

from collections.abc import Sequence

from brigata.schedule.build import PAIR_OPERATORS
from brigata.schedule.chunks import Chunks, Pairs

Rows = Sequence[int] | Sequence[Sequence[int]]
"""Rows of each rank's chunk; for an all-to-all ``rows[s][d]``, those that go from rank s to rank d."""


def cut(operator: str, rows: Rows, parts: int = 1) -> Chunks:
    """``rows`` in ``parts`` parts, as ``operator`` wants them."""
    if operator in PAIR_OPERATORS:
        return Pairs.of([[*_several(row)] for row in rows], parts)
    return Chunks(tuple(_one(row) for row in rows), parts)


def _one(row: int | Sequence[int]) -> int:
    assert isinstance(row, int), "rows of a chunk are a number"
    return row


def _several(row: int | Sequence[int]) -> Sequence[int]:
    assert not isinstance(row, int), "an all-to-all wants rows for every pair of ranks"
    return row

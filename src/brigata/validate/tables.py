"""Rows of tables of published measurements, as text, with what they leave out left out."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from brigata.describe.errors import JobError

NEEDED = ("id", "source_key", "model")
"""Columns without which a file is no such table."""


class RefusedRowError(ValueError):
    """A row that is not predicted, and why."""


@dataclass(frozen=True)
class Row:
    """One published measurement; an empty cell says nothing."""

    cells: dict[str, str]

    def text(self, column: str) -> str:
        """What the column says; empty: nothing."""
        return (self.cells.get(column) or "").strip()

    def number(self, *columns: str) -> float | None:
        """The first of the columns that says something."""
        for column in columns:
            if self.text(column):
                try:
                    return float(self.text(column))
                except ValueError:
                    raise RefusedRowError(f"{column} = {self.text(column)!r} is no number") from None
        return None

    def need(self, column: str) -> int:
        """A whole number that the row cannot do without."""
        value = self.number(column)
        if value is None:
            raise RefusedRowError(f"{column} is missing")
        return int(value)

    def count(self, column: str, default: int = 1) -> int:
        """A whole number, ``default`` where nothing is said."""
        value = self.number(column)
        return default if value is None else int(value)

    @property
    def id(self) -> str:
        """Unique in its table."""
        return self.text("id")

    @property
    def source(self) -> str:
        """Who published it."""
        return self.text("source_key")

    @property
    def measured_s(self) -> float | None:
        """Seconds of a step: printed, or derived as the table says, or from tokens a second."""
        seconds = self.number("iter_time_s", "iter_time_derived_s")
        if seconds is None:
            rate, devices = self.number("tokens_per_s_per_gpu"), self.number("gpus")
            batch, length = self.number("global_batch"), self.number("seq_len")
            if rate and devices and batch and length:
                return batch * length / (rate * devices)
        return seconds

    @property
    def judged(self) -> bool:
        """Whether its error counts: read from a text or table, its layout stated, not marked as wrong."""
        words = self.text("verification") + " " + self.text("notes")
        doubtful = ("digitized", "layout recalled", "EXCLUDE", "LAYOUT INCONSISTENT")
        return self.source != "bigscience-v100" and not any(word in words for word in doubtful)


def read_rows(paths: Iterable[Path]) -> Iterator[Row]:
    """All rows of the tables.

    Raises:
        JobError: a file is not there, or is no such table.
    """
    for path in paths:
        try:
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                missing = [name for name in NEEDED if name not in (reader.fieldnames or [])]
                if missing:
                    raise JobError(
                        f"{str(path)!r} is no table of measurements: the column {missing[0]!r} is missing; "
                        "`brigata validate --columns` lists them"
                    )
                for cells in reader:
                    yield Row(cells)
        except OSError as error:
            reason = error.strerror or "cannot be read"
            raise JobError(f"table {str(path)!r}: {reason}; name a CSV file") from None
        except UnicodeDecodeError as error:
            raise JobError(f"table {str(path)!r} is not UTF-8: {error.reason}; save it as UTF-8") from None

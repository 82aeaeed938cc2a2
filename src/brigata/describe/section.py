"""The common base of every section of a job."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, refuses unknown keys, converts no types silently except whole numbers to floats."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

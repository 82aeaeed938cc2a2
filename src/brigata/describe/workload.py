"""How much work one optimizer step is."""

from pydantic import Field

from brigata.describe.section import Section


class Workload(Section):
    """Sizes of a step's input."""

    seq_len: int = Field(gt=0)
    """Length of a sequence (tokens)."""
    global_batch: int = Field(gt=0)
    """Sequences in one optimizer step, over all ranks."""
    micro_batch: int | None = Field(default=None, gt=0)
    """Sequences in one forward pass of one data-parallel rank. Default: all of its share, no accumulation."""

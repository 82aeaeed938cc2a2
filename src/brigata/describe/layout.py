"""How the work is spread over ranks: degrees and methods."""

from typing import Literal

from pydantic import Field, field_validator

from brigata.describe.order import parse_order
from brigata.describe.section import Section


class Layout(Section):
    """Degrees of parallelism and the methods that go with them. ``ranks = tp * cp * pp * dp``."""

    tp: int = Field(default=1, gt=0)
    """Tensor parallelism with sequence parallelism (TPSP): weights and residual stream cut over tp ranks."""
    cp: int = Field(default=1, gt=0)
    """Context parallelism."""
    pp: int = Field(default=1, gt=0)
    """Pipeline stages."""
    ep: int = Field(default=1, gt=0)
    """Expert parallelism; folds into dp * cp."""
    dp: int | None = Field(default=None, gt=0)
    """Data parallelism. Default: what ``cluster.devices`` leaves, else 1."""
    zero: Literal[1, 2, 3] = 2
    """What dp ranks share out: 1 optimizer state, 2 gradients as well, 3 parameters as well."""
    zero_engine: Literal["brigata", "fsdp2"] = "brigata"
    """Who runs data parallelism: our engine, or PyTorch's ``fully_shard`` (stages 2 and 3)."""
    overlap: str = "direct"
    """Order of the tensor-parallel operators: ``direct``, ``ring``, ``sliced:4``, ``blocking_p2p``, ...;
    ``direct:2`` and ``ring:2`` cut each chunk into 2 sub-chunks. ``auto`` measures the machine and takes
    for each operator the order that the simulator finds fastest; two runs are then bitwise equal only where
    it chooses alike."""
    keep_gathered: bool = True
    """Keep the gathered input of a column-parallel product for its weight gradient. ``false`` saves
    tokens * hidden * (tp - 1) / tp elements a unit and gathers once more in the backward pass."""

    @field_validator("overlap")
    @classmethod
    def _known_order(cls, text: str) -> str:
        if text == "auto":
            return text
        try:
            parse_order(text)
        except ValueError as error:
            raise ValueError(f"layout.overlap = {text!r} {error}") from None
        return text

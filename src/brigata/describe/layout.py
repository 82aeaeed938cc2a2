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
    """Pipeline ranks."""
    ep: int = Field(default=1, gt=0)
    """Expert parallelism; folds into tp * cp * dp."""
    dp: int | None = Field(default=None, gt=0)
    """Data parallelism. Default: what ``cluster.devices`` leaves, else 1."""
    dp_replicate: int = Field(default=1, gt=0)
    """Replicas: the dp axis is dp_replicate groups of dp / dp_replicate neighbouring ranks. Parameters are
    cut by ZeRO inside a group, gradients are summed over the groups too (hybrid sharded data parallelism,
    HSDP)."""
    sequence_parallel: bool = True
    """Under tp, the residual stream between units is cut over the ranks too. ``false`` is for planning."""
    expert_tp: int | None = Field(default=None, gt=0)
    """Ranks over which one expert's width is cut. Default: tp."""
    cp_method: Literal["ring", "gather", "ulysses"] = "ring"
    """How attention sees the other ranks' tokens: keys and values go round, are gathered, or heads are
    exchanged for tokens (all-to-all). Mamba-2 hands its states on in any case."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"] | None = None
    """Order of the pipeline. Default: ``interleaved`` with virtual stages, else ``1f1b``."""
    virtual_stages: int = Field(default=1, gt=0)
    """Stages of a pipeline rank."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward computes again: nothing, attention's core, or whole units."""
    recompute_layers: int | None = Field(default=None, gt=0)
    """Under ``full``: so many layers of each pipeline rank. Default: all."""
    offload: Literal["none", "optimizer", "activations"] = "none"
    """What lies in the host's memory."""
    zero: Literal[0, 1, 2, 3] = 2
    """What dp ranks share out: 0 nothing (planning only), 1 optimizer state, 2 gradients as well, 3
    parameters as well."""
    zero_engine: Literal["brigata", "fsdp2"] = "brigata"
    """Who runs data parallelism: our engine, or PyTorch's ``fully_shard`` (stages 2 and 3)."""
    slice_by_owner: bool = True
    """Under our engine, compute the first unit's input projections rank by rank: forward, the own rows of the
    weights first, while the others arrive; backward, first the rows that other ranks own, each sent at once.
    Nothing else hides these messages. Under tp > 1 they are left as they are."""
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

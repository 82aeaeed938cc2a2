"""What devices there are."""

from typing import Literal

from pydantic import Field

from brigata.describe.section import Section


class ClusterSpec(Section):
    """The machine or machines that a job runs on."""

    preset: Literal["local"] = "local"
    """``local`` is this machine, whatever it is. Described clusters arrive with the simulator."""
    devices: int | None = Field(default=None, gt=0)
    """Number of ranks. Omitted: as many as the layout needs."""

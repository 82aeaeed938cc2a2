"""What a published memory figure counts: tensors only, or what the driver sees."""

from brigata.simulate.memory import MemoryUse
from brigata.validate.tables import Row

DRIVER_GB = 7.5
"""What ``nvidia-smi`` shows beside tensors in a job of many process groups (GB): context, communication
library, and what the allocator holds unused. The constant of Jean Zay's rows."""
FRAMEWORK_GB = 1.0
"""The same of a run in one node with few groups (GB)."""


def measured_bytes(row: Row) -> float | None:
    """Published peak (bytes); None: none is."""
    value = row.number("peak_mem_gb")
    if value is None:
        return None
    return value * (2**30 if "GiB" in row.text("mem_kind") else 1e9)


def predicted_bytes(row: Row, use: MemoryUse) -> float:
    """What the same figure would be of a prediction."""
    kind = row.text("mem_kind").lower()
    if "nvidia-smi" in kind:
        return use.allocated + DRIVER_GB * 1e9
    if "gib" in kind or "rounded" in kind:
        return use.allocated + FRAMEWORK_GB * 1e9
    return use.allocated

"""Which world of processes this one belongs to, told by the environment."""

import os
import re
from collections.abc import Mapping


def surrounding_world(environment: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """The variables by which ``torch.distributed`` joins the world that a launcher made; None without one.

    torchrun and its like set ``RANK`` and ``WORLD_SIZE``. Under Slurm (``srun`` with several tasks) they
    follow from Slurm's own; rank 0's host is the first of the step's node list, the port follows from the
    job's number.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return {}
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        nodes = environment.get("SLURM_STEP_NODELIST", "localhost")
        port = 20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 20_000
        return {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
            "WORLD_SIZE": environment["SLURM_NTASKS"],
            "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(nodes)),
            "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
        }
    return None


def first_host(nodes: str) -> str:
    """First host of a Slurm node list: ``node[03-07,12],x1`` -> ``node03``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],\-]+))?", nodes)
    assert match is not None, f"node list {nodes!r}"
    return match[1] + (match[2] or "")

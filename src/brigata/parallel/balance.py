"""Balance of experts by bias, over all data: one small sum a step."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from brigata.model.decoder import Decoder
from brigata.model.experts import Router, update_balance
from brigata.overlap.evidence import Evidence

BALANCE = "data_parallel.balance"
"""Operator under which the sum of the experts' loads is counted."""


def balance_experts(model: Decoder, mesh: DeviceMesh | None, evidence: Evidence) -> None:
    """Move every router's balancing bias by the loads of the step that ended; nothing where there is none.

    Every tp rank routes all of its data-parallel rank's tokens, so loads are summed over the dp axis only.

    Args:
        model: routers in place, whole or localised.
        mesh: with the axis dp; None for a single process.
        evidence: where the wait is counted.
    """
    routers = [part for part in model.modules() if isinstance(part, Router) and hasattr(part, "balance_bias")]
    if not routers:
        return
    loads = torch.stack([router.load for router in routers])
    if mesh is not None and mesh["dp"].size() > 1:
        counted = evidence.operators[BALANCE]
        counted.calls += 1
        with evidence.waiting(BALANCE, "tail", loads.device):
            dist.all_reduce(loads, group=mesh["dp"].get_group())
    for router, load in zip(routers, loads, strict=True):
        update_balance(router, load)

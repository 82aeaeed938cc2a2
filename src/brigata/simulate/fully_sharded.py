"""ZeRO-2 and ZeRO-3: parameters gathered and gradients scattered unit by unit, beside the computation."""

from dataclasses import dataclass, field

from brigata.cost.held import dense_held, routed_held
from brigata.cost.messages import Message
from brigata.simulate.stages import Passes, StageCosts
from brigata.simulate.synchronisation import replicas


@dataclass
class Exposed:
    """Seconds by kind that a micro-batch's passes are longer for these messages."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)


def gather_and_scatter(costs: StageCosts, stage: Passes) -> Exposed:
    """What the messages of a pipeline rank's units add to each pass over a micro-batch.

    ZeRO-3 gathers parameters for the forward and again for the backward of every micro-batch; gradients are
    scattered every micro-batch from ZeRO-2 on (Rajbhandari et al., arXiv 1910.02054). ZeRO-2's parameters
    come back once a step. The first gather and the last scatter have nothing beside them.
    """
    arrangement = costs.arrangement
    job, share = arrangement.job, arrangement.share
    model, layout = job.model, job.layout
    dense, routed = replicas(arrangement)
    inside = dense // layout.dp_replicate
    gather = scatter = 0.0
    largest = 0.0
    for letter in model.pattern:
        for held, ranks in (
            (dense_held(model, letter, share), inside),
            (routed_held(model, letter, share), routed),
        ):
            if not held or ranks == 1:
                continue
            weights, gradients = held * share.itemsize, held * arrangement.software.gradient_bytes
            one = costs.message_seconds(Message("all_gather", "dp", weights, ranks, "parameters"))
            gather += one
            scatter += costs.message_seconds(Message("reduce_scatter", "dp", gradients, ranks, "gradients"))
            largest = max(largest, one)
    share_of_stage = 1 / layout.pp
    gather, scatter = gather * share_of_stage, scatter * share_of_stage
    software = arrangement.software
    result = Exposed()
    backward = stage.again.total + stage.input_gradient.total + stage.weight_gradient.total
    forward_travel = gather if layout.zero == 3 else gather / job.accumulation
    backward_travel = scatter + (gather if layout.zero == 3 else 0.0)
    for travel, beside, into in (
        (forward_travel, stage.forward.total, result.forward),
        (backward_travel, backward, result.backward),
    ):
        hidden = min(travel, beside) * (1 - software.exposed)
        into["exposed dp"] = travel - hidden
        into["contention"] = hidden * software.contention
    return result

"""ZeRO-2 and ZeRO-3: parameters gathered and gradients scattered unit by unit, beside the computation."""

from dataclasses import dataclass, field

from brigata.cost.data_parallel import backward_messages, forward_messages, model_shards
from brigata.cost.messages import Message
from brigata.simulate.stages import Passes, StageCosts
from brigata.simulate.synchronisation import replicas, widths_of


@dataclass
class Exposed:
    """Seconds by kind that a micro-batch's passes are longer for these messages."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)


def gather_and_scatter(costs: StageCosts, stage: Passes) -> Exposed:
    """What the messages of a pipeline rank's units add to each pass over a micro-batch.

    A rank has its share of the model's units; what computation does not hide waits, and what it hides slows
    it down.
    """
    arrangement = costs.arrangement
    job, software = arrangement.job, arrangement.software
    dense, routed = replicas(arrangement)
    shards = list(model_shards(job.model, arrangement.share, dense, routed, job.layout.dp_replicate))
    widths = widths_of(arrangement)
    result = Exposed()
    backward = stage.again.total + stage.input_gradient.total + stage.weight_gradient.total
    for messages, beside, into in (
        (forward_messages(shards, job.layout.zero, widths), stage.forward.total, result.forward),
        (backward_messages(shards, job.layout.zero, widths), backward, result.backward),
    ):
        if job.train.trained == "lora":  # frozen parameters are gathered, their gradients do not exist
            messages = [message for message in messages if message.operation == "all_gather"]
        travel = _seconds(costs, messages) / job.layout.pp
        hidden = min(travel, beside) * (1 - software.exposed)
        into["exposed dp"] = travel - hidden
        into["contention"] = hidden * software.contention
    return result


def _seconds(costs: StageCosts, messages: list[Message]) -> float:
    """Equal messages are timed once."""
    return sum(messages.count(message) * costs.message_seconds(message) for message in set(messages))

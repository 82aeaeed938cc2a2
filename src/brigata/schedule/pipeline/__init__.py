"""Pipeline schedules as data: who computes which stage of which micro-batch, in which order."""

from brigata.schedule.pipeline.actions import Action, Kind, PipelineError, Transfer
from brigata.schedule.pipeline.build import PIPELINE_ORDERS, build_pipeline
from brigata.schedule.pipeline.checker import check_pipeline, held_activations
from brigata.schedule.pipeline.messages import Exchange, check_messages, with_messages
from brigata.schedule.pipeline.programs import PipelineSchedule

__all__ = [
    "PIPELINE_ORDERS",
    "Action",
    "Exchange",
    "Kind",
    "PipelineError",
    "PipelineSchedule",
    "Transfer",
    "build_pipeline",
    "check_messages",
    "check_pipeline",
    "held_activations",
    "with_messages",
]

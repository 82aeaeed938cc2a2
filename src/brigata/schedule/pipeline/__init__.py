"""Pipeline schedules as data: who computes which stage of which micro-batch, in which order."""

from brigata.schedule.pipeline.actions import Action, Kind, PipelineSchedule
from brigata.schedule.pipeline.build import PIPELINE_ORDERS, build_pipeline
from brigata.schedule.pipeline.checker import check_pipeline, held_activations

__all__ = [
    "PIPELINE_ORDERS",
    "Action",
    "Kind",
    "PipelineSchedule",
    "build_pipeline",
    "check_pipeline",
    "held_activations",
]

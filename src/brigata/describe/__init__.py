"""What is to be run: a job and its sections, read from TOML, refused where it cannot run."""

from brigata.describe.cluster import ClusterSpec
from brigata.describe.errors import JobError
from brigata.describe.job import Job, load_job, parse_job
from brigata.describe.layout import Layout
from brigata.describe.model import ModelSpec
from brigata.describe.order import Order, parse_order
from brigata.describe.parameters import count_active_parameters, count_parameters
from brigata.describe.train import TrainSpec
from brigata.describe.workload import Workload

__all__ = [
    "ClusterSpec",
    "Job",
    "JobError",
    "Layout",
    "ModelSpec",
    "Order",
    "TrainSpec",
    "Workload",
    "count_active_parameters",
    "count_parameters",
    "load_job",
    "parse_job",
    "parse_order",
]

"""Brigata from Python: the entry points that the commands use too."""

from pathlib import Path

from brigata.describe.job import Job, load_job, parse_job
from brigata.parallel.apply import ParallelModel, build_model, parallelize
from brigata.train.launch import launch

__all__ = ["Job", "ParallelModel", "build_model", "load_job", "parallelize", "parse_job", "run_training"]


def run_training(job: Job, out: str | None = None) -> Path:
    """Train ``job`` on local ranks, or as one rank of the surrounding world; returns the run's folder.

    Scripts that call this need the usual ``if __name__ == "__main__":`` guard, because local ranks are
    spawned.

    Raises:
        JobError: the job cannot run; nothing was started.
        RankError: a rank failed; all were stopped.
    """
    return launch(job, out)

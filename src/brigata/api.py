"""Brigata from Python: the entry points that the commands use too."""

from pathlib import Path

from brigata.describe.errors import JobError
from brigata.describe.job import Job, load_job, parse_job
from brigata.parallel.apply import ParallelModel, build_model, parallelize
from brigata.simulate.inference import Serving, serve_times
from brigata.simulate.prediction import Prediction, predict
from brigata.train.launch import launch

__all__ = [
    "Job",
    "ParallelModel",
    "Prediction",
    "Serving",
    "build_model",
    "load_job",
    "parallelize",
    "parse_job",
    "run_training",
    "simulate_serving",
    "simulate_step",
]


def simulate_step(job: Job, anchor: Path | None = None) -> Prediction:
    """Predict one optimizer step of ``job``: time, where it goes, memory, and how sure that is.

    Jobs on devices that are not here come from ``load_job(path, run=False)``. ``anchor`` is the folder of a
    run whose measured step corrects the prediction.

    Raises:
        JobError: the schedule does not go with the numbers, or the folder is no run's.
    """
    return predict(job, anchor)


def simulate_serving(job: Job) -> Serving:
    """Predict how ``job``, which has a ``[serve]`` section, serves its requests.

    Raises:
        JobError: the section is missing.
    """
    if job.serve is None:
        raise JobError("[serve] is missing; add it with prompt, output and batch")
    return serve_times(job)


def run_training(job: Job, out: str | None = None) -> Path:
    """Train ``job`` on local ranks, or as one rank of the surrounding world; returns the run's folder.

    Scripts that call this need the usual ``if __name__ == "__main__":`` guard, because local ranks are
    spawned.

    Raises:
        JobError: the job cannot run; nothing was started.
        RankError: a rank failed; all were stopped.
    """
    return launch(job, out)

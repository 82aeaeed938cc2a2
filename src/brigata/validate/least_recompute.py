"""How much a job must compute again to fit, for rows that do not say."""

from brigata.describe.job import Job
from brigata.simulate.arrangement import Arrangement
from brigata.simulate.iteration import schedule_of
from brigata.simulate.memory import memory_of


def with_least_recompute(job: Job) -> Job:
    """``job`` with the fewest recomputed layers with which it fits; with all of them if it never does."""
    if _fits(job):
        return job
    most = max(1, -(-len(job.model.pattern) // (2 * job.layout.pp)))
    few, many = 0, most  # few do not fit
    while many - few > 1:
        middle = (few + many) // 2
        if _fits(_with(job, middle)):
            many = middle
        else:
            few = middle
    return _with(job, many if many < most else None)


def _with(job: Job, layers: int | None) -> Job:
    layout = job.layout.model_copy(update={"recompute": "full", "recompute_layers": layers})
    return job.model_copy(update={"layout": layout})


def _fits(job: Job) -> bool:
    uses = memory_of(Arrangement.of(job), schedule_of(job))
    return max(use.total for use in uses) <= job.cluster.device.memory_gb * 1e9

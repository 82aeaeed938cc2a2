"""What was predicted of a run, beside what was measured of it."""

import json
from pathlib import Path

from rich.table import Table

from brigata.describe.cluster import ClusterSpec
from brigata.describe.job import Job
from brigata.simulate.prediction import Prediction, predict


def predict_run(job: Job) -> Prediction:
    """The prediction of a run of our own: ``job`` under the software ``brigata``, on its own cluster.

    Raises:
        JobError: the schedule does not go with the numbers.
    """
    cluster = ClusterSpec.model_validate(job.cluster.model_dump() | {"software": "brigata"})
    return predict(job.model_copy(update={"cluster": cluster}))


def compare(job: Job, step_s: float, peak_bytes: int) -> Table:
    """Predicted beside measured, and their ratio.

    Args:
        job: what ran.
        step_s: median time of its steps (seconds).
        peak_bytes: memory of its fullest rank (bytes); 0: not known.
    """
    found = predict_run(job)
    memory = found.memory[found.fullest].total
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for column in ("predicted", "measured", "predicted / measured"):
        table.add_column(column, justify="right")
    table.add_row("step", _ms(found.seconds), _ms(step_s), _ratio(found.seconds, step_s))
    table.add_row("memory", _mib(memory), _mib(peak_bytes), _ratio(memory, peak_bytes))
    return table


def compare_run(job: Job, folder: Path) -> Table:
    """The same of a finished run, from what it left in ``folder``."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    last = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return compare(job, summary["median_step_time_s"], json.loads(last)["peak_memory_bytes"])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB" if size else "–"


def _ratio(predicted: float, measured: float) -> str:
    return f"{predicted / measured:.2f}" if measured else "–"

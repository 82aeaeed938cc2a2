"""A simulated step as spans, for a trace."""

from collections.abc import Iterator

from brigata.simulate.iteration import Iteration
from brigata.simulate.result import Span


def pipeline_spans(iteration: Iteration) -> Iterator[Span]:
    """One span an action of each pipeline rank, and what follows the pipeline on the rank that ends last."""
    pipeline, schedule = iteration.pipeline, iteration.schedule
    for rank, (program, starts, ends) in enumerate(
        zip(schedule.programs, pipeline.starts, pipeline.ends, strict=True)
    ):
        for action, start, end in zip(program, starts, ends, strict=True):
            yield Span(rank, "compute", str(action), start, end)
    done = max(ends[-1] for ends in pipeline.ends)
    for kind in ("exposed dp", "contention", "optimizer"):
        seconds = iteration.breakdown.get(kind, 0.0)
        if seconds > 0:
            yield Span(0, "phase", kind, done, done + seconds)
            done += seconds

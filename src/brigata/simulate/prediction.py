"""What is predicted of a job's step: time, where it goes, memory, and how sure that is."""

import json
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from brigata.cost.units import flops, head_forward, unit_forward
from brigata.describe.errors import JobError
from brigata.describe.job import Job
from brigata.simulate.arrangement import Arrangement
from brigata.simulate.iteration import Iteration, iterate
from brigata.simulate.memory import MemoryUse, memory_of

Tier = Literal["specification", "micro-measurements", "anchored"]
"""What a prediction rests on: published rates only, curves fitted to measurements, or a run of this job."""
CONVENTION = (
    "6 operations a parameter and token but for the embedding, and causal attention's seen pairs; 3 x forward"
)
"""How model operations are counted for MFU; HFU counts recomputation too."""
ANCHORED = (0.95, 1.06)
"""Interval of an anchored prediction: what two runs of one job differ by, and a little."""
BUSY_POWER = 0.85
"""Share of the power limit while a device computes; energy is not validated."""


@dataclass(frozen=True)
class Prediction:
    """Of one optimizer step.

    Attributes:
        job: whose.
        iteration: time, and what it is spent on.
        model_flops: operations of the whole step without recomputation.
        memory: by pipeline rank.
        low: and ``high``, factors of the interval in which four of five published runs lie.
        high: see ``low``.
        tier: what it rests on.
        scale: factor that an anchoring run gave.
    """

    job: Job
    iteration: Iteration
    model_flops: float
    memory: list[MemoryUse]
    low: float
    high: float
    tier: Tier
    scale: float = 1.0

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.iteration.seconds * self.scale

    @property
    def fullest(self) -> int:
        """The pipeline rank that holds most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def mfu(self) -> float:
        """Model operations over what the devices could do at their peak."""
        return self.model_flops / (self.seconds * self._peak)

    @property
    def hfu(self) -> float:
        """The same with what is computed again."""
        return self.iteration.flops * self.job.layout.tp * self._others / (self.seconds * self._peak)

    @property
    def _others(self) -> int:
        return self.job.layout.pp * self.job.layout.cp * self.job.dp

    @property
    def _peak(self) -> float:
        return self.job.ranks * self.job.cluster.device.peak(self.job.train.precision)

    @property
    def energy_j(self) -> float | None:
        """Joules of a step over all devices, not validated; None where the power limit is not known."""
        power = self.job.cluster.device.power_w
        return None if power is None else power * BUSY_POWER * self.job.ranks * self.seconds

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        capacity = self.job.cluster.device.memory_gb * 1e9
        use = self.memory[self.fullest]
        tokens = self.job.tokens_per_step / self.seconds
        return {
            "iteration_time_s": self.seconds,
            "low_s": self.seconds * self.low,
            "high_s": self.seconds * self.high,
            "tokens_per_s": tokens,
            "tokens_per_s_per_device": tokens / self.job.ranks,
            "model_tflops_per_device": self.model_flops / self.seconds / self.job.ranks / 1e12,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "breakdown_s": {kind: part * self.scale for kind, part in self.iteration.breakdown.items()},
            "memory_bytes": {**use.by_kind, "total": use.total, "capacity": capacity},
            "fits": use.total <= capacity,
            "oom_probability": use.too_large_probability(capacity),
            "energy_j": self.energy_j,
            "tier": self.tier,
        }


def predict(job: Job, anchor: Path | None = None) -> Prediction:
    """Predict a step of ``job``.

    Args:
        job: need not be able to run here.
        anchor: folder of a run whose measured step time corrects the prediction.

    Raises:
        JobError: the folder is no run's, or the schedule does not go with the numbers.
    """
    arrangement = Arrangement.of(job)
    try:
        iteration = iterate(arrangement)
    except ValueError as error:
        raise JobError(f"layout.schedule = {job.schedule!r}: {error}") from None
    low, high = interval_of(job)
    tier: Tier = "micro-measurements" if job.cluster.device.fitted else "specification"
    memory = memory_of(arrangement, iteration.schedule)
    found = Prediction(job, iteration, _model_flops(arrangement), memory, low, high, tier)
    if anchor is None:
        return found
    return replace(found, scale=_anchored(anchor, job), low=ANCHORED[0], high=ANCHORED[1], tier="anchored")


def _model_flops(arrangement: Arrangement) -> float:
    """Of a whole step: 3 x forward, in bf16's attention convention, over all ranks."""
    job, share = arrangement.job, arrangement.share
    alone = replace(
        share,
        length=job.workload.seq_len,
        keys=job.workload.seq_len,
        tp=1,
        ep=1,
        expert_tp=None,
        fused_attention=True,
    )
    units = sum(
        job.model.pattern.count(letter) * flops(unit_forward(job.model, letter, alone))
        for letter in set(job.model.pattern)
    )
    forward = units + flops(head_forward(job.model, alone))
    return 3.0 * forward * job.workload.global_batch / job.micro_batch


@cache
def _accuracy() -> dict[str, list[float]]:
    """Software -> the factors between which four of five published runs lie."""
    text = (resources.files("brigata.simulate") / "accuracy.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["interval"]  # type: ignore[no-any-return]


def interval_of(job: Job) -> tuple[float, float]:
    """The interval of the nearest validated rows, the same software's; wider on an unmeasured device."""
    known = _accuracy()
    low, high = known.get(job.cluster.software, known["all"])
    wider = 1.0 if job.cluster.device.fitted else 1.5
    return 1 - (1 - low) * wider, 1 + (high - 1) * wider


def _anchored(folder: Path, job: Job) -> float:
    """Measured over predicted of the run in ``folder``, on this job's cluster."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        ran = Job.model_validate_json((folder / "job.json").read_text(encoding="utf-8"))
        measured = float(summary["median_step_time_s"])
    except (OSError, KeyError, ValueError) as error:
        raise JobError(
            f"--anchor {str(folder)!r} is no finished run ({type(error).__name__}); "
            "name a folder of `brigata train`"
        ) from None
    same = ran.model_copy(update={"cluster": job.cluster})
    return measured / iterate(Arrangement.of(same)).seconds

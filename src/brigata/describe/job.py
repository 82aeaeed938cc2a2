"""The job: the whole request, one TOML file."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from brigata.describe.cluster import ClusterSpec
from brigata.describe.errors import JobError, refusals_from_pydantic
from brigata.describe.layout import Layout
from brigata.describe.model import ModelSpec
from brigata.describe.refusals import find_refusals
from brigata.describe.section import Section
from brigata.describe.serve import ServeSpec
from brigata.describe.train import TrainSpec
from brigata.describe.workload import Workload


class Job(Section):
    """What is to be run, on what, how spread out."""

    version: Literal[1]
    """Version of the job's format."""
    name: str = Field(default="job", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    """Name of the job; the run's folder carries it."""
    model: ModelSpec
    cluster: ClusterSpec = ClusterSpec()
    workload: Workload
    layout: Layout
    train: TrainSpec = TrainSpec()
    serve: ServeSpec | None = None
    """What is served (planning only)."""

    @property
    def dp(self) -> int:
        """Data-parallel degree, filled from ``cluster.devices`` when the layout leaves it out."""
        if self.layout.dp is not None:
            return self.layout.dp
        return max((self.cluster.devices or 0) // self._ranks_without_dp, 1)

    @property
    def ranks(self) -> int:
        """Number of processes the layout needs."""
        return self._ranks_without_dp * self.dp

    @property
    def micro_batch(self) -> int:
        """Sequences in one forward pass of one data-parallel rank."""
        return self.workload.micro_batch or max(self.workload.global_batch // self.dp, 1)

    @property
    def accumulation(self) -> int:
        """Forward and backward passes before each optimizer step."""
        return self.workload.global_batch // (self.micro_batch * self.dp)

    @property
    def schedule(self) -> str:
        """Order of the pipeline, default filled in."""
        return self.layout.schedule or ("interleaved" if self.layout.virtual_stages > 1 else "1f1b")

    @property
    def warmup(self) -> int:
        """Steps over which the learning rate rises."""
        return min(self.train.steps // 10, 100) if self.train.warmup is None else self.train.warmup

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.workload.global_batch * self.workload.seq_len

    @property
    def _ranks_without_dp(self) -> int:
        return self.layout.tp * self.layout.cp * self.layout.pp


def parse_job(data: dict[str, Any], run: bool = True) -> Job:
    """Read a job from plain data and refuse what cannot run, or (``run`` false) cannot be planned.

    Raises:
        JobError: with one sentence for each mistake.
    """
    if "layout" not in data:
        raise JobError("[layout] is missing: there is no planner yet; add a [layout] section (tp = 2)")
    if data["layout"] == "auto":
        raise JobError("layout = 'auto' needs the planner, which is not there yet; write a [layout] section")
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        raise JobError(*refusals_from_pydantic(error, Job)) from None
    refusals = find_refusals(job, run)
    if refusals:
        raise JobError(*refusals)
    return job


def load_job(path: Path, overrides: Sequence[str] = (), run: bool = True) -> Job:
    """Read a job file and apply ``section.key=value`` overrides (values in TOML notation, or bare words).

    ``run`` false: a job that is described and planned, on devices that need not be here.

    Raises:
        JobError: the file is not there or not TOML, or the job cannot run.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise JobError(f"job file {str(path)!r}: {reason}; `brigata init {path}` writes a new one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"job file {str(path)!r} is not valid TOML: {error}") from None
    for override in overrides:
        _apply_override(data, override)
    return parse_job(data, run)


def _apply_override(data: dict[str, Any], override: str) -> None:
    setting, equals, text = override.partition("=")
    path = setting.strip().split(".")
    if not equals or not all(path):
        raise JobError(f"--set {override!r} is not understood; write --set section.key=value")
    section = data
    for name in path[:-1]:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise JobError(f"--set {override!r}: {name} is a value, not a section; write --set {name}=value")
    section[path[-1]] = _read_value(text.strip())


def _read_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text

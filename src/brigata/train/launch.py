"""Starts a job: its own local ranks, or this process as one rank of a world that a launcher made."""

import logging
import os
import signal
import uuid
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from brigata.describe.errors import JobError
from brigata.describe.job import Job
from brigata.model.checkpoint import open_checkpoint
from brigata.parallel.mesh import device_type
from brigata.train.corpus import load_corpus
from brigata.train.loop import train
from brigata.train.tokenizer import load_tokenizer
from brigata.train.world import surrounding_world


class RankError(RuntimeError):
    """A rank died or raised; the message names it and its error. All other ranks have been ended."""


def run_directory(job: Job, out: str | None, now: datetime) -> Path:
    """Where a run goes: ``--out``, else ``train.out``, else ``runs/NAME-TIME``.

    Raises:
        JobError: a run is already there.
    """
    chosen = out or job.train.out
    path = Path(chosen) if chosen else Path("runs") / f"{job.name}-{now:%Y%m%d-%H%M%S}"
    if (path / "metrics.jsonl").exists():
        raise JobError(f"train.out = {str(path)!r} holds a run already; name another folder with --out")
    return path


def refuse_early(job: Job) -> None:
    """Refuse data, a tokenizer or a checkpoint that does not do, before any rank starts.

    Raises:
        JobError: says which, and what would work.
    """
    load_corpus(job.train.data, job.workload.seq_len)
    load_tokenizer(job)
    if job.model.path is not None:
        with open_checkpoint(Path(job.model.path)):
            pass


def launch(job: Job, out: str | None) -> Path:
    """Train ``job``; returns the run's folder when every rank is done.

    Raises:
        JobError: before any rank starts, when the job cannot run.
        RankError: a rank failed.
        KeyboardInterrupt: the user stopped it; every rank has been ended.
    """
    path = run_directory(job, out, datetime.now())
    refuse_early(job)
    surrounding = surrounding_world()
    if surrounding is not None:
        os.environ.update(surrounding)
        world = int(os.environ["WORLD_SIZE"])
        if world != job.ranks:
            raise JobError(
                f"the layout needs {job.ranks} ranks (layout.tp = {job.layout.tp}, layout.dp = {job.dp}) "
                f"but the world has {world}; start {job.ranks} ranks"
            )
        _rank_main(job.model_dump_json(), str(path))
        return path
    devices = torch.accelerator.device_count() if device_type() != "cpu" else None
    if devices is not None and devices < job.ranks:
        raise JobError(
            f"the layout needs {job.ranks} ranks but this machine has {devices} devices; use fewer"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(
            f"train.out = {str(path)!r}: {error.strerror}; name a folder that can be made"
        ) from None
    _start_local_ranks(job, path)
    return path


def _start_local_ranks(job: Job, path: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = str(job.train.threads)
    loopback = _loopback_interface()
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):  # each has its own level
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, _local_rank_main)(job.model_dump_json(), str(path))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankError(_describe(rank, failure)) from None
    except SignalException as received:
        raise KeyboardInterrupt from received


def _describe(rank: int, failure: ProcessFailure) -> str:
    """One sentence on a rank's end."""
    if failure.exitcode < 0:
        name = failure.signal_name()
        return f"rank {rank} (process {failure.pid}) was ended by {name}; all ranks were stopped"
    message = failure.message
    text = message.get("message", message) if isinstance(message, dict) else message
    return f"rank {rank} (process {failure.pid}) failed: {text}; all ranks were stopped"


def _loopback_interface() -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return None


@record
def _local_rank_main(job_json: str, out: str) -> None:
    """One rank of our own making: on Ctrl-C it ends without a word; the launcher speaks for all."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _rank_main(job_json, out)


def _rank_main(job_json: str, out: str) -> None:
    """One rank, from joining the world to leaving it."""
    job = Job.model_validate_json(job_json)
    torch.set_num_threads(job.train.threads)
    kind = device_type()
    device = torch.device(kind)
    if kind != "cpu":
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=job.train.timeout_s))
    try:
        if dist.get_rank() == 0:
            Path(out).mkdir(parents=True, exist_ok=True)
        train(job, Path(out), device)
        dist.barrier()
    finally:
        dist.destroy_process_group()

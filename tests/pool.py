"""Persistent worker processes for tests: importing torch costs seconds, so it is paid once a run."""

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any


def _serve(rank: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        function, world, store_file, args = task
        try:
            store = dist.FileStore(store_file, world)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
            try:
                answer = ("ok", function(*args))
            finally:
                dist.destroy_process_group()
        except BaseException:
            answer = ("error", f"rank {rank} of {world}:\n{traceback.format_exc()}")
        pipe.send(answer)


class Pool:
    """Up to ``size`` gloo ranks that run functions of test modules."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pipes: list[Connection] = []
        self.processes: list[mp.process.BaseProcess] = []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """``function(*args)`` on ranks 0 .. world - 1 of one process group; their results in rank order."""
        if not self.processes:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self.pipes[:world]:
                pipe.send((function, world, f"{folder}/store", args))
            answers: dict[Connection, tuple[str, Any]] = {}
            while len(answers) < world:
                ready = wait([pipe for pipe in self.pipes[:world] if pipe not in answers], timeout)
                if not ready:
                    self.close()
                    raise TimeoutError(f"{function.__name__} took more than {timeout} s; answered: {answers}")
                answers |= {pipe: pipe.recv() for pipe in ready if isinstance(pipe, Connection)}
                if any(kind == "error" for kind, _ in answers.values()):
                    break
            errors = [text for kind, text in answers.values() if kind == "error"]
            if errors:
                self.close()
                raise AssertionError("\n".join(errors))
            return [answers[pipe][1] for pipe in self.pipes[:world]]

    def close(self) -> None:
        """End all workers."""
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []

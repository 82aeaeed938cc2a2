"""Two ranks on loopback or on a shaped link, and competitors that take their turns in them."""

import argparse
import json
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from figures import Section, report


def start_ranks(script: str, rate: str | None, repetitions: int) -> dict[str, Any]:
    """Run ``script`` as two ranks, on loopback or on a shaped link; what rank 0 prints last, read as JSON."""
    from brigata.measure.namespaces import loopback_hosts, run_ranks, shaped_network

    path = str(Path(script).resolve())
    argv = [sys.executable, path, "--rank", "--repetitions", str(repetitions)]
    if rate is None:
        outputs = run_ranks(loopback_hosts(2), argv, timeout_s=1800, port=_free_port())
    else:
        with shaped_network(2, rate) as hosts:
            outputs = run_ranks(hosts, argv, timeout_s=1800)
    result: dict[str, Any] = json.loads(outputs[0].strip().splitlines()[-1])
    return result


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def take_turns(
    steps: Mapping[str, Callable[[], Any]], repetitions: int, seen: Callable[[str, float, Any], None]
) -> dict[str, list[float]]:
    """Milliseconds of every step, from a common start to the last rank's end; each goes first in turn.

    ``seen`` is told the name, this rank's own milliseconds and what the step returned.
    """
    import torch
    import torch.distributed as dist

    samples: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for repetition in range(repetitions):
        for i in range(len(names)):
            name = names[(i + repetition) % len(names)]
            dist.barrier()
            start = perf_counter()
            returned = steps[name]()
            own_ms = (perf_counter() - start) * 1e3
            duration = torch.tensor(own_ms)
            dist.all_reduce(duration, dist.ReduceOp.MAX)
            samples[name].append(float(duration))
            seen(name, own_ms, returned)
    return samples


def quartiles(times: list[float]) -> str:
    """``median (lower quartile to upper quartile)``, whole milliseconds."""
    low, _, high = quantiles(times, n=4) if len(times) > 1 else times * 3
    return f"{median(times):.0f} ({low:.0f} to {high:.0f})"


def run_benchmark(
    script: str, text: str, run: Callable[[int], dict[str, Any] | None], section: Section
) -> None:
    """The command line of a two-rank benchmark: start ``script`` as two ranks, or be one of them.

    Args:
        script: the file that calls this.
        text: shown as help.
        run: what a rank does with a number of repetitions; rank 0 returns the result.
        section: prints the result, which it wants by rate.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="link rate, for instance 1gbit (Linux, root); default: loopback")
    parser.add_argument("--repetitions", type=int, default=section.repetitions)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measured = run(options.repetitions)
        if measured is not None:
            print(json.dumps(measured))
        return
    result = {options.rate or "loopback": start_ranks(script, options.rate, options.repetitions)}
    print(report(section, result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")

"""Traces of chosen steps, all ranks on one clock, in one file."""

import json
from dataclasses import astuple
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from brigata.parallel.apply import ParallelModel
from brigata.simulate.result import Span
from brigata.simulate.trace import write_trace

ROUNDS = 16
"""Exchanges with rank 0 by which a rank's clock is compared; the quickest one counts."""


def begin_trace(model: ParallelModel) -> None:
    """From now on every product, wait and message of this rank is noted."""
    model.evidence.rank = dist.get_rank()
    model.evidence.trace = []


def end_trace(model: ParallelModel, path: Path, title: str, device: torch.device) -> None:
    """Stop noting, bring all ranks' spans to rank 0's clock and let rank 0 write them to ``path``."""
    spans, model.evidence.trace = model.evidence.trace or [], None
    offset = _clock_offset(device)
    rows = [astuple(span) for span in spans]
    everyone = _gather_texts(json.dumps(rows), device)
    offsets = _gather_texts(json.dumps(offset), device)
    if dist.get_rank() == 0:
        moved = [
            Span(rank, kind, name, start - json.loads(shift), end - json.loads(shift))
            for text, shift in zip(everyone, offsets, strict=True)
            for rank, kind, name, start, end in json.loads(text)
        ]
        write_trace(moved, path, title)


def _clock_offset(device: torch.device) -> float:
    """This rank's clock less rank 0's (seconds), to half the quickest round trip.

    Each rank in turn sends rank 0 a token and gets rank 0's clock back; that reading is taken for the
    middle of the round trip.
    """
    rank, offset = dist.get_rank(), 0.0
    for other in range(1, dist.get_world_size()):
        best = float("inf")
        for _ in range(ROUNDS if rank in (0, other) else 0):
            clock = torch.zeros(1, dtype=torch.float64, device=device)
            if rank == 0:
                dist.recv(clock, other)
                clock.fill_(perf_counter())
                dist.send(clock, other)
            else:
                sent = perf_counter()
                dist.send(clock, 0)
                dist.recv(clock, 0)
                back = perf_counter()
                if back - sent < best:
                    best, offset = back - sent, (sent + back) / 2 - float(clock)
    return offset


def _gather_texts(text: str, device: torch.device) -> list[str]:
    """Every rank's text at every rank, without pickling."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    texts: list[Tensor] = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [
        bytes(whole[: int(size)].cpu().numpy()).decode() for whole, size in zip(texts, sizes, strict=True)
    ]

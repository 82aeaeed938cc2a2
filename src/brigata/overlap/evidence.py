"""What the operators really did: calls, messages, and the time in which a rank waited for the network."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch

from brigata.simulate.result import Kind, Span


@dataclass
class OperatorEvidence:
    """Counts and exposed communication of one operator pass on one rank.

    ``head_s`` is waited before the first product, ``tail_s`` after the last one, ``middle_s`` in between
    (seconds). ``compute_s`` is spent in products by the host's clock (seconds): on an accelerator that is
    only the time in which they are started.
    """

    calls: int = 0
    overlapped_calls: int = 0
    products: int = 0
    compute_s: float = 0.0
    messages: int = 0
    bytes_sent: int = 0
    head_s: float = 0.0
    middle_s: float = 0.0
    tail_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """All time in which this rank waited for the network (seconds)."""
        return self.head_s + self.middle_s + self.tail_s


@dataclass
class Evidence:
    """Evidence of every operator pass since the last ``take``, by operator name.

    On the CPU a wait is timed by the clock. On an accelerator the host does not wait: two device events
    around the wait tell how long the stream stood still, and they are read in ``take``. (Device events have
    not been run on NCCL or HCCL yet.)

    ``trace`` collects spans while it is a list: products, waits and messages, the last from their start to
    the end of the wait for them (when a message arrives earlier than it is waited for, nobody is told).
    """

    operators: dict[str, OperatorEvidence] = field(default_factory=lambda: defaultdict(OperatorEvidence))
    trace: list[Span] | None = None
    rank: int = 0
    _pending: list[tuple[str, str, torch.Event, torch.Event]] = field(default_factory=list)

    @contextmanager
    def waiting(self, operator: str, where: str, device: torch.device) -> Iterator[None]:
        """Count the time inside as exposed: ``where`` is ``head``, ``middle`` or ``tail``."""
        if device.type == "cpu":
            start = perf_counter()
            yield
            end = perf_counter()
            self._add(operator, where, end - start)
            self.span("wait", f"{operator} ({where})", start, end)
            return
        before, after = (torch.Event(device.type, enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._pending.append((operator, where, before, after))

    @contextmanager
    def computing(self, operator: str, product: str) -> Iterator[None]:
        """A product: counted and timed, and traced where a trace is wanted."""
        counted = self.operators[operator]
        counted.products += 1
        start = perf_counter()
        yield
        end = perf_counter()
        counted.compute_s += end - start
        self.span("compute", f"{operator}: {product}", start, end)

    def span(self, kind: Kind, name: str, start_s: float, end_s: float) -> None:
        """Add a span to the trace, if one is wanted; seconds of ``time.perf_counter``."""
        if self.trace is not None:
            self.trace.append(Span(self.rank, kind, name, start_s, end_s))

    def take(self) -> dict[str, OperatorEvidence]:
        """What was counted since the last call; counting begins anew."""
        for operator, where, before, after in self._pending:
            after.synchronize()
            self._add(operator, where, before.elapsed_time(after) / 1e3)
        self._pending.clear()
        taken = dict(self.operators)
        self.operators.clear()
        return taken

    def _add(self, operator: str, where: str, seconds: float) -> None:
        counted = self.operators[operator]
        setattr(counted, f"{where}_s", getattr(counted, f"{where}_s") + seconds)

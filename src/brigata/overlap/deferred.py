"""Weight gradients that are computed later: I (input gradient) at once, W (weight gradient) when asked for.

A pipeline under a zero-bubble schedule sends the input gradient on before anybody computes a weight gradient.
Where a linear operator is called while a ``WeightGradientQueue`` is active, its backward computes and
communicates I only and leaves W in the queue, with the tensors that W needs; ``run`` computes it.

Such a call hides its weights from autograd: a backward that reached them without a gradient would run their
hooks all the same, and free what lies between them and their parameters. The deferred gradient then takes
autograd's own way back to the parameter from the tensor that the operator was handed, through a DTensor's
``to_local`` or a cast, with its accumulation and its hooks. A parameter's hooks run once for each deferred
use, and once for all of a backward's uses that are not deferred (an embedding's under tied weights).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brigata.overlap.evidence import Evidence

Gradients = Callable[[], Sequence[Tensor | None]]
"""Computes weight gradients, each in its weight's dtype; None for a weight that wants none."""


@dataclass(frozen=True, eq=False)
class _Pending:
    """W of one operator call; ``held`` are the tensors that it needs, each with its version at that time."""

    label: Hashable
    operator: str
    weights: tuple[Tensor, ...]
    held: tuple[tuple[Tensor, int], ...]
    gradients: Gradients


class WeightGradientQueue:
    """The weight gradients of one rank that were deferred and are still to be computed, oldest first.

    Args:
        evidence: where operators without a channel count what they do; default: a new one.
    """

    def __init__(self, evidence: Evidence | None = None) -> None:
        self.evidence = Evidence() if evidence is None else evidence
        self.active = False
        self._label: Hashable = None
        self._pending: list[_Pending] = []

    @contextmanager
    def deferring(self, label: Hashable = None) -> Iterator[None]:
        """A scope for forwards whose backwards, whenever they run, leave their weight gradients here.

        ``label`` is what ``run`` may ask for: stage and micro-batch, say.
        """
        before = self.active, self._label
        self.active, self._label = True, label
        try:
            yield
        finally:
            self.active, self._label = before

    def pending(self, label: Hashable = None) -> int:
        """Operator calls whose W is still to be computed: all, or those under ``label``."""
        return len(self._of(label))

    @property
    def bytes_held(self) -> int:
        """Bytes of the tensors that are kept for what is pending; a storage that several use counts once."""
        storages = (tensor.untyped_storage() for entry in self._pending for tensor, _ in entry.held)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def run(self, count: int | None = None, label: Hashable = None) -> int:
        """Compute the oldest deferred weight gradients and add them to their parameters' gradients.

        Args:
            count: of operator calls; None: all.
            label: only what was deferred under this label; None: whatever label.

        Returns:
            The number of operator calls computed.

        Raises:
            RuntimeError: a tensor that is needed was changed in place since.
        """
        asked = self._of(label)[:count]
        for entry in asked:
            self._pending.remove(entry)
            _compute(entry)
        return len(asked)

    def end_step(self) -> None:
        """Call when a step's gradients are taken for complete.

        Raises:
            RuntimeError: something is still pending.
        """
        if self._pending:
            operators = ", ".join(sorted({entry.operator for entry in self._pending}))
            raise RuntimeError(
                f"{len(self._pending)} weight gradients were deferred and never computed ({operators}); "
                f"run the queue before the step ends"
            )

    def _of(self, label: Hashable) -> list[_Pending]:
        return [entry for entry in self._pending if label is None or entry.label == label]


@dataclass(frozen=True, eq=False)
class Deferral:
    """What one operator call needs in order to leave its W to ``queue`` later.

    ``weights`` are as the operator was handed them. Autograd sees them ``detached`` instead, and ``anchor``,
    for whose sake the call has a backward though its other inputs may want no gradient.
    """

    queue: WeightGradientQueue
    label: Hashable
    weights: tuple[Tensor, ...]
    detached: tuple[Tensor, ...]
    anchor: Tensor

    @classmethod
    def of(cls, queue: WeightGradientQueue | None, weights: Sequence[Tensor]) -> "Deferral | None":
        """For a call that begins; None where ``queue`` is not active or no weight wants a gradient."""
        wanted = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        if queue is None or not queue.active or not wanted:
            return None
        detached = tuple(weight.detach() for weight in weights)
        anchor = weights[0].new_empty(0, requires_grad=True)
        return cls(queue, queue._label, tuple(weights), detached, anchor)

    def leave(self, operator: str, held: Sequence[Tensor], gradients: Gradients) -> None:
        """Queue W.

        Args:
            operator: the pass that W will be.
            held: every tensor that ``gradients`` reads.
            gradients: called once, by ``run``.
        """
        versions = tuple((tensor, tensor._version) for tensor in held)
        self.queue._pending.append(_Pending(self.label, operator, self.weights, versions, gradients))


class _Accumulate(torch.autograd.Function):
    """A graph node whose backward is W: its results go on to the weights as any other gradient does."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients())


def _compute(entry: _Pending) -> None:
    for tensor, version in entry.held:
        if tensor._version != version:
            raise RuntimeError(
                f"{entry.operator}: a tensor of {tuple(tensor.shape)} that the deferred weight gradient "
                f"needs was changed in place; run the queue first, or change a copy"
            )
    with torch.enable_grad():
        token: Tensor = _Accumulate.apply(entry.gradients, *entry.weights)  # type: ignore[no-untyped-call]
    # what lies between a weight and its parameter may serve several deferred uses
    torch.autograd.backward(token, torch.zeros_like(token), retain_graph=True)

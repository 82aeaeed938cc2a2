"""What a unit sends under tensor parallelism with sequence parallelism (TPSP), forward and backward.

The collectives are those of the overlapped operators (``overlap``), whose counters tests compare with these.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from brigata.cost.units import Share
from brigata.describe.model import ModelSpec

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True)
class Message:
    """A collective, or one message, of ``ranks`` ranks on a mesh axis.

    Attributes:
        operation: which.
        axis: tp, cp, dp, ep or pp.
        bytes: of the whole tensor: gathered, before it is scattered, reduced, or sent.
        ranks: that take part.
        what: what travels, for people.
    """

    operation: Operation
    axis: str
    bytes: float
    ranks: int
    what: str

    @property
    def sent(self) -> float:
        """Bytes that each rank sends at least (Thakur et al., doi 10.1177/1094342005051521)."""
        if self.operation == "send":
            return self.bytes
        share = (self.ranks - 1) / self.ranks * self.bytes
        if self.operation == "all_reduce":
            return 2 * share
        return share / self.ranks if self.operation == "all_to_all" else share


def _stream(model: ModelSpec, share: Share, operation: Operation, what: str) -> Message:
    """The residual stream of all tokens, or as much."""
    return Message(operation, "tp", float(share.tokens * model.hidden * share.itemsize), share.tp, what)


def tensor_forward(model: ModelSpec, letter: str, share: Share) -> list[Message]:
    """Messages of one unit's forward pass over tp; none where tp is 1.

    Without sequence parallelism the output is all-reduced and nothing is gathered.
    """
    if share.tp == 1:
        return []
    pairs = _pairs(model, letter, share)
    if not share.sequence_parallel:
        return [_stream(model, share, "all_reduce", "output")] * pairs + [*_norm(model, letter, share)]
    gather = _stream(model, share, "all_gather", "input")
    scatter = _stream(model, share, "reduce_scatter", "output")
    return [gather, scatter] * pairs + [*_norm(model, letter, share)]


def _pairs(model: ModelSpec, letter: str, share: Share) -> int:
    """Feed-forwards and mixers of a unit that are cut over tp, each with one message in and one out."""
    if letter == "E" and model.experts is not None:
        return (share.cut_experts > 1) + bool(model.experts.shared_ffn)
    return 2 if letter in ("m", "S") else 1


def tensor_backward(model: ModelSpec, letter: str, share: Share, keep_gathered: bool = True) -> list[Message]:
    """Messages of one unit's backward pass over tp; ``keep_gathered``: as ``layout.keep_gathered``."""
    if share.tp == 1:
        return []
    pairs = _pairs(model, letter, share)
    if not share.sequence_parallel:
        return [_stream(model, share, "all_reduce", "input's gradient")] * pairs + [
            *_norm(model, letter, share)
        ]
    messages = [
        _stream(model, share, "all_gather", "output's gradient"),
        _stream(model, share, "reduce_scatter", "input's gradient"),
    ] * pairs
    routed = letter == "E" and share.cut_experts > 1  # routed experts keep their tokens in any case
    products = pairs - routed
    if not keep_gathered:
        messages += [_stream(model, share, "all_gather", "input again")] * products
    return [*messages, *_norm(model, letter, share)]


def _norm(model: ModelSpec, letter: str, share: Share) -> Iterator[Message]:
    """Sums of squares of a gated norm whose groups lie on several ranks: every rank's to every rank."""
    if letter != "M" or model.mamba is None or model.mamba.gate == "none":
        return
    groups = model.mamba.normalised_groups
    if groups % share.tp:
        wide = max(share.itemsize, 4)
        yield Message("all_gather", "tp", float(share.tp * share.tokens * groups * wide), share.tp, "norm")


def sent_bytes(messages: list[Message]) -> float:
    """Bytes that one rank sends in all of them."""
    return sum(message.sent for message in messages)

"""The ways of others, as they are: TransformerEngine's userbuffers and PyTorch's async tensor parallelism.

Both compute the own chunk first (all-gather) or last (reduce-scatter), keep every arrived partial sum in a
buffer of its own and reduce all of them after the last product. PyTorch's barriers are kept as well; its two
streams are one program here, and the two barriers that end one step and begin the next are one.

Sources: TransformerEngine, comm_gemm_overlap.cpp, ``CommOverlapP2PBase::split_overlap_rs`` and ``_ag``;
PyTorch 2.13, torch/distributed/_symmetric_memory, ``_pipelined_produce_and_all2all`` and
``_pipelined_multi_all_gather_and_consume``.
"""

from collections.abc import Sequence

from brigata.schedule.chunks import Piece
from brigata.schedule.request import Scatter, work
from brigata.schedule.steps import Add, Barrier, Message, Place, Post, Receive, Send, Step, Wait


def between_barriers(steps: Sequence[Step]) -> list[Step]:
    """Peers read from each other's buffers: all must have filled theirs, and nobody may leave early."""
    return [Barrier(), *steps, Barrier()]


def userbuffers(ask: Scatter) -> list[Step]:
    """Every contribution goes straight to its owner; one reduction over all of them ends the operator."""
    messages: list[Message] = []
    steps: list[Step] = []
    for turn in range(1, ask.ranks):
        outgoing, incoming = work(turn - 1), work(ask.ranks - 2 + turn)
        pair = _pair(ask, turn, outgoing, incoming)
        steps += [ask.compute(pair[0].piece, outgoing), Post(pair)]
        messages += pair
    return [*steps, *_own(ask), *map(Wait, messages), _reduction(ask, messages)]


def async_tp(ask: Scatter) -> list[Step]:
    """The same with two send buffers; a barrier before peers fetch from one and before it is used again."""
    messages: list[Message] = []
    steps: list[Step] = []
    for turn in range(1, ask.ranks):
        outgoing, incoming = work(turn % 2), work(turn + 1)
        pair = _pair(ask, turn, outgoing, incoming)
        steps.append(ask.compute(pair[0].piece, outgoing))
        steps += map(Wait, messages[-2:])
        steps += [Barrier(), Post(pair)]
        messages += pair
    steps += [*_own(ask), *map(Wait, messages[-2:])]
    return [*between_barriers(steps), _reduction(ask, messages)]


def _pair(ask: Scatter, turn: int, outgoing: Place, incoming: Place) -> tuple[Send, Receive]:
    """The contribution for the rank ``turn`` to the right, and that of the rank ``turn`` to the left."""
    to, source = ask.peer(turn), ask.peer(-turn)
    return Send(Piece(to), outgoing, to), Receive(Piece(ask.rank), incoming, source)


def _own(ask: Scatter) -> list[Step]:
    return [ask.compute(Piece(ask.rank), ask.own(Piece(ask.rank)))]


def _reduction(ask: Scatter, messages: Sequence[Message]) -> Add:
    own = ask.own(Piece(ask.rank))
    return Add((*(message.place for message in messages if isinstance(message, Receive)), own), own)

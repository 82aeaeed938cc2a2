"""Where the messages of a pipeline schedule stand among its actions, and the proof that they meet.

Ranks that only start their messages in the order in which they compute can hang: one sends activations while
the other sends gradients, and neither has begun to receive. Here all messages of all ranks get one common
order, that of the times at which they are there when every F, I and W takes one unit, and every rank starts
its own in this order.
"""

from dataclasses import dataclass

from brigata.schedule.pipeline.actions import Action, Kind, PipelineError, Transfer
from brigata.schedule.pipeline.dependencies import KINDS
from brigata.schedule.pipeline.programs import PipelineSchedule


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages between this rank and one other that start together: those both ways of one moment.

    They are posted without waiting for them; the action that takes one waits for it. A transfer is a send
    where its ``source`` is this rank.
    """

    transfers: tuple[Transfer, ...]


Entry = Action | Exchange


def with_messages(schedule: PipelineSchedule) -> tuple[tuple[Entry, ...], ...]:
    """Each rank's actions and exchanges in the order in which it starts them.

    Deadlock-free even if every exchange blocks: actions and exchanges of all ranks follow one common order,
    in which a result leaves after it is computed and arrives before it is taken.
    """
    flat = schedule.flat
    length = {Kind.BACKWARD: 2.0}
    unit = [length.get(kind, 1.0) for kind in KINDS]
    seconds = [unit[work % len(KINDS)] for work in flat.work]
    ends, _ = flat.run(seconds, [0.0] * len(seconds))
    events: list[list[tuple[float, int, int, Entry]]] = [[] for _ in schedule.programs]
    moments: dict[tuple[float, int, int], list[Transfer]] = {}
    for rank, entries in enumerate(flat.entries):
        for place, (action, entry) in enumerate(zip(schedule.programs[rank], entries, strict=True)):
            end = ends[entry]
            # at one moment messages come before actions, pair by pair in the same order on all ranks
            events[rank].append((end - seconds[entry - 1], schedule.ranks**2, place, action))
            if flat.sends[entry - 1] >= 0:
                transfer = _transfer(schedule, rank, action)
                pair = (min(rank, transfer.target), max(rank, transfer.target))
                moments.setdefault((end, *pair), []).append(transfer)
    for (moment, low, high), transfers in moments.items():
        exchange = Exchange(tuple(sorted(transfers)))
        for rank in (low, high):
            events[rank].append((moment, low * schedule.ranks + high, -1, exchange))
    return tuple(tuple(entry for *_, entry in sorted(own, key=lambda event: event[:3])) for own in events)


def _transfer(schedule: PipelineSchedule, rank: int, action: Action) -> Transfer:
    forward = action.kind is Kind.FORWARD
    neighbour = action.stage + (1 if forward else -1)
    return Transfer(forward, action.stage, action.micro_batch, rank, schedule.ranks_of[neighbour])


def check_messages(schedule: PipelineSchedule, programs: tuple[tuple[Entry, ...], ...]) -> int:
    """Prove ``programs``, the actions of ``schedule`` with exchanges among them.

    Exchanges have no tags: the k-th of a rank with another meets the k-th of that one with it, and no rank
    goes on before its own has met. Programs that end under these semantics end under any weaker ones.

    Returns:
        The most messages that lie on one rank, arrived and not yet taken.

    Raises:
        PipelineError: a deadlock, an exchange of different messages at its two ends, a result sent before it
            is computed, taken before it is there, sent or left without a taker, or actions other than the
            schedule's.
    """
    for rank, program in enumerate(programs):
        if tuple(entry for entry in program if not isinstance(entry, Exchange)) != schedule.programs[rank]:
            raise PipelineError(f"rank {rank} has other actions than its schedule")
    position = [0] * schedule.ranks
    computed: set[Transfer] = set()
    lying: list[set[Transfer]] = [set() for _ in programs]
    most, moved = 0, True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                entry = program[position[rank]]
                if isinstance(entry, Exchange):
                    other = _other(rank, entry)
                    theirs = _at(programs[other], position[other])
                    if not isinstance(theirs, Exchange) or _other(other, theirs) != rank:
                        break
                    if theirs != entry:
                        raise PipelineError(
                            f"{entry} of rank {rank} meets {theirs} of rank {other}: both wait for ever"
                        )
                    for transfer in entry.transfers:
                        if transfer not in computed:
                            raise PipelineError(f"{transfer} leaves before it is computed, or twice")
                        computed.remove(transfer)
                        lying[transfer.target].add(transfer)
                    position[other] += 1
                else:
                    _act(schedule, rank, entry, computed, lying[rank])
                most = max(most, *map(len, lying))
                position[rank] += 1
                moved = True
    for rank, program in enumerate(programs):
        if position[rank] < len(program):
            raise PipelineError(f"rank {rank} waits for ever at {program[position[rank]]}")
    if left := next(iter(computed.union(*lying)), None):
        raise PipelineError(f"nobody takes {left}")
    return most


def _at(program: tuple[Entry, ...], position: int) -> Entry | None:
    return program[position] if position < len(program) else None


def _other(rank: int, exchange: Exchange) -> int:
    ends = {end for transfer in exchange.transfers for end in (transfer.source, transfer.target)}
    others = ends - {rank}
    if len(others) != 1 or rank not in ends:
        raise PipelineError(f"{exchange} of rank {rank} is not between it and one other")
    return others.pop()


def _act(
    schedule: PipelineSchedule, rank: int, action: Action, computed: set[Transfer], lying: set[Transfer]
) -> None:
    """Take what ``action`` needs from another rank, and have what it sends."""
    if action.kind is Kind.WEIGHT_GRADIENT:
        return
    ahead = 1 if action.kind is Kind.FORWARD else -1
    before, after = action.stage - ahead, action.stage + ahead
    if 0 <= before < schedule.stages and (source := schedule.ranks_of[before]) != rank:
        taken = Transfer(ahead == 1, before, action.micro_batch, source, rank)
        if taken not in lying:
            raise PipelineError(f"rank {rank} computes {action} before {taken} is there")
        lying.remove(taken)
    if 0 <= after < schedule.stages and schedule.ranks_of[after] != rank:
        computed.add(_transfer(schedule, rank, action))

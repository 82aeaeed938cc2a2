"""Receives posted as early as their places allow: for backends whose posts take effect at once."""

from collections.abc import Sequence

from brigata.schedule.steps import Barrier, Collective, Post, Program, Receive, Step, Wait, touched


def receives_ahead(program: Program) -> Program:
    """``program`` with every receive moved to the earliest point at which its place is free.

    A sender may need to be told that the receiver's buffer is ready before it starts. With gloo this notice
    takes the connection on which the receiver's own data leaves, and behind that data it waits: told early,
    it never does. Receives from one rank keep their order, and none passes a barrier or a collective.

    Not for backends whose posts take effect one after the other, as on NCCL's stream: a receive whose
    message is sent late would hold up everything posted behind it.
    """
    steps: list[Step] = []
    for step in program.steps:
        if not isinstance(step, Post):
            steps.append(step)
            continue
        staying = tuple(message for message in step.messages if not isinstance(message, Receive))
        for message in step.messages:
            if isinstance(message, Receive):
                _insert(steps, _earliest(steps, message), message)
        if staying:
            steps.append(Post(staying))
    return Program(program.rank, _fused(steps), program.wire)


def _earliest(steps: Sequence[Step], receive: Receive) -> int:
    """Index in ``steps`` before which ``receive`` must not be posted."""
    for i in reversed(range(len(steps))):
        match steps[i]:
            case Barrier() | Collective():
                return i + 1
            case Wait(message=message):
                if message.place == receive.place:
                    return i + 1
            case Post(messages=messages):
                for other in messages:
                    same_way = isinstance(other, Receive) and other.peer == receive.peer
                    if same_way or other.place == receive.place:
                        return i + 1
            case step:
                reads, writes = touched(step)
                if receive.place in (*reads, *writes):
                    return i + 1
    return 0


def _insert(steps: list[Step], at: int, receive: Receive) -> None:
    """Post ``receive`` at ``at``, together with the receives that are posted there already."""
    previous = steps[at - 1] if at else None
    if isinstance(previous, Post):
        steps[at - 1] = Post((*previous.messages, receive))
    elif at < len(steps) and isinstance(following := steps[at], Post):
        steps[at] = Post((receive, *following.messages))
    else:
        steps.insert(at, Post((receive,)))


def _fused(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Neighbouring posts made one."""
    fused: list[Step] = []
    for step in steps:
        if isinstance(step, Post) and fused and isinstance(last := fused[-1], Post):
            fused[-1] = Post((*last.messages, *step.messages))
        else:
            fused.append(step)
    return tuple(fused)

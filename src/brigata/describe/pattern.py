"""The grammar of a model's pattern: one letter a residual unit, groups repeated by a number after them.

::

    pattern   = item*
    item      = (letter | "(" pattern ")") [number]

``(*-)32`` is 32 Transformer layers, ``M48`` is 48 Mamba-2 units.

=======  ====================================================  ==========
letter   residual unit                                         runs
=======  ====================================================  ==========
``*``    attention over the whole sequence                     yes
``w``    attention in a sliding window of ``window`` tokens    yes
``-``    dense feed-forward (MLP)                              yes
``M``    Mamba-2                                               yes
``E``    mixture of experts                                    yes
``m``    Mamba-1 (Jamba)                                       planning only
``L``    multi-head latent attention, MLA (DeepSeek)           planning only
``S``    attention and MLP shared by several places (Zamba)    planning only
=======  ====================================================  ==========

Llama is ``(*-)32``, Mistral ``(w-)32``, Gemma 2 ``(w-*-)13``, Mamba-2 ``M64``, Mixtral ``(*E)32``.
"""

import re

from brigata.describe.errors import one_of

UNIT_LETTERS = {
    "*": "attention",
    "w": "sliding-window attention",
    "-": "dense MLP",
    "M": "Mamba-2",
    "E": "experts",
    "m": "Mamba-1",
    "L": "multi-head latent attention",
    "S": "shared attention and MLP",
}
"""What each letter of a pattern names."""
RUNNING_LETTERS = "*w-ME"
"""Letters whose units run; the others are described for planning only."""
ATTENTION_LETTERS = "*w"
"""Letters whose units use ``heads``, ``kv_heads`` and ``head_dim``."""
LONGEST_GROUP = 24
"""Units of a group that ``contract_pattern`` looks for."""
MOST_UNITS = 10_000
"""A pattern that spells out more units is taken for a mistake."""

_TOKEN = re.compile(r"(\D)(\d*)")


def expand_pattern(pattern: str) -> str:
    """One letter a unit, repetitions written out: ``"(*-)2M2"`` becomes ``"*-*-MM"``.

    Raises:
        ValueError: the pattern is empty, too long, or not in the grammar; the message says what would work.
    """
    known = "; ".join(f"{letter} is {name}" for letter, name in UNIT_LETTERS.items())
    if not pattern:
        raise ValueError(f"model.pattern = '' has no units; write one letter a residual unit ({known})")
    stack = [""]
    position = 0
    while position < len(pattern):
        match = _TOKEN.match(pattern, position)
        if match is None:
            raise ValueError(
                f"model.pattern = {pattern!r} begins with a number; write it after what is repeated"
            )
        letter, number = match.groups()
        position = match.end()
        if letter == "(":
            if number:
                raise ValueError(f"model.pattern = {pattern!r} has a number after '('; write it after ')'")
            stack.append("")
            continue
        if letter == ")":
            if len(stack) == 1:
                raise ValueError(f"model.pattern = {pattern!r} closes a group that is not open; drop the ')'")
            piece = stack.pop()
        elif letter in UNIT_LETTERS:
            piece = letter
        else:
            raise ValueError(f"model.pattern has the letter {letter!r}, which names no unit; {known}")
        repeats = min(int(number or 1), MOST_UNITS + 1)
        if number and int(number) == 0:
            raise ValueError(f"model.pattern = {pattern!r} repeats something 0 times; use 1 or more")
        stack[-1] += piece * repeats
        if len(stack[-1]) > MOST_UNITS:
            raise ValueError(f"model.pattern = {pattern!r} has more than {MOST_UNITS:,} units; use fewer")
    if len(stack) > 1:
        raise ValueError(f"model.pattern = {pattern!r} leaves a group open; add a ')'")
    if not stack[0]:
        raise ValueError(f"model.pattern = {pattern!r} has no units; write a letter between the brackets")
    return stack[0]


def contract_pattern(units: str) -> str:
    """``units`` with repetitions written as such: ``"L-LELE"`` becomes ``"L-(LE)2"``."""
    pieces, i = [], 0
    while i < len(units):
        groups = (_repetition(units, i, length) for length in range(1, LONGEST_GROUP + 1))
        written, spelt = max(groups, key=_gain)
        pieces.append(written)
        i += spelt
    return "".join(pieces)


def _repetition(units: str, start: int, length: int) -> tuple[str, int]:
    """The ``length`` units at ``start`` as often as they follow each other, and their number."""
    group = units[start : start + length]
    times = 1
    while units.startswith(group, start + times * length):
        times += 1
    if times == 1 or len(group) < length:
        return units[start], 1
    return (f"{group}{times}" if length == 1 else f"({group}){times}"), length * times


def _gain(repetition: tuple[str, int]) -> int:
    """Letters that writing it so saves."""
    written, spelt = repetition
    return spelt - len(written)


def planning_only(units: str) -> str | None:
    """Why ``units`` cannot be run, in one sentence, or None if they can."""
    for letter in units:
        if letter not in RUNNING_LETTERS:
            return (
                f"model.pattern has the letter {letter!r}: {UNIT_LETTERS[letter]} units are described for "
                f"planning only; to run, use {one_of(RUNNING_LETTERS)}"
            )
    return None

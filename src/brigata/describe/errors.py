"""How a user's mistake is told: one sentence each, with the setting, its value and what would work."""

import difflib
from collections.abc import Iterable
from typing import get_args

from pydantic import BaseModel, ValidationError


class JobError(ValueError):
    """A job that cannot run. ``refusals`` holds one sentence for each mistake; nothing was started."""

    def __init__(self, *refusals: str) -> None:
        self.refusals = list(refusals)
        super().__init__("\n".join(self.refusals))


def one_of(choices: Iterable[object]) -> str:
    """Join choices as prose: ``[1, 2, 4]`` becomes ``1, 2 or 4``."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def divisors(n: int) -> list[int]:
    """All positive divisors of ``n``, smallest first."""
    return [d for d in range(1, n + 1) if n % d == 0]


def refusals_from_pydantic(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Turn pydantic's findings into Brigata's sentences.

    Args:
        error: what pydantic raised while reading a job.
        root: the model that was being read; its fields are what a misspelt key is compared with.
    """
    findings = error.errors()
    wrong = {finding["loc"][:-1] for finding in findings if finding["type"] != "missing"}
    # A wrong value leaves the defaults that follow from it unfilled: only the wrong value is the mistake.
    return [_sentence(f, root) for f in findings if f["type"] != "missing" or f["loc"][:-1] not in wrong]


def _sentence(finding: object, root: type[BaseModel]) -> str:
    assert isinstance(finding, dict)
    path = [str(part) for part in finding["loc"]]
    setting, value, kind = ".".join(path), finding.get("input"), finding["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path, root)
    if kind == "missing":
        return f"{setting} is missing; it has no default and must be set"
    if kind == "value_error":
        return str(finding["ctx"]["error"])
    message = finding["msg"][0].lower() + finding["msg"][1:]
    return f"{setting} = {value!r} is refused: {message}"


def _unknown_key(path: list[str], root: type[BaseModel]) -> str:
    section: type[BaseModel] = root
    for name in path[:-1]:
        section = _section_of(section.model_fields[name].annotation)
    known = sorted(section.model_fields)
    close = difflib.get_close_matches(path[-1], known, n=1)
    prefix = ".".join([*path[:-1], ""])
    hint = f"did you mean {prefix}{close[0]}?" if close else f"known here: {', '.join(known)}"
    return f"{'.'.join(path)} is not a setting; {hint}"


def _section_of(annotation: object) -> type[BaseModel]:
    """The section that a key holds, whether it may be left out or not."""
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    raise AssertionError(f"{annotation} is no section")

"""The grammar of patterns: what it spells, what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brigata.describe.pattern import UNIT_LETTERS, contract_pattern, expand_pattern, planning_only


@pytest.mark.parametrize(
    ("pattern", "units"),
    [
        ("*-*-", "*-*-"),
        ("(*-)3", "*-*-*-"),
        ("M4", "MMMM"),
        ("(M-)2*E2", "M-M-*EE"),
        ("((M-)2*)2", "M-M-*M-M-*"),
        ("(*-)", "*-"),
        ("(w-*-)2", "w-*-w-*-"),
    ],
)
def test_patterns_spell_units(pattern: str, units: str) -> None:
    assert expand_pattern(pattern) == units


@given(st.text(alphabet="".join(UNIT_LETTERS), min_size=1, max_size=40))
def test_contracting_and_expanding_gives_the_same_units(units: str) -> None:
    assert expand_pattern(contract_pattern(units)) == units
    assert len(contract_pattern(units)) <= len(units) + 3


@given(st.text(alphabet="*-ME()019 x", max_size=12))
def test_any_text_is_spelt_or_refused_with_a_way_out(text: str) -> None:
    try:
        units = expand_pattern(text)
    except ValueError as refusal:
        assert "model.pattern" in str(refusal)
        return
    assert set(units) <= set(UNIT_LETTERS)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("", "has no units"),
        ("3*-", "begins with a number"),
        ("(2*-)", "after '('"),
        ("*-)", "drop the ')'"),
        ("(*-", "add a ')'"),
        ("*x", "the letter 'x', which names no unit"),
        ("*0", "0 times"),
        ("*99999999999", "more than 10,000 units"),
        ("()3", "has no units"),
    ],
)
def test_malformed_patterns_are_refused_with_a_way_out(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"model\.pattern") as refusal:
        expand_pattern(pattern)
    assert words in str(refusal.value)


def test_units_for_planning_are_named() -> None:
    assert planning_only("*-wME") is None
    for letter, name in (
        ("m", "Mamba-1"),
        ("L", "multi-head latent attention"),
        ("S", "shared attention and MLP"),
    ):
        assert name in str(planning_only("*" + letter))

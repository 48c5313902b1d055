"""Budgets have a unit: a share of the tokens, entries per head, or bytes of the whole cache."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvest.budget import Bytes, Entries, Footprint, Fraction, read_budget

NOTHING = Footprint(1, 0, 1)
footprints = st.builds(Footprint, st.integers(1, 10**6), st.integers(0, 10**9), st.integers(1, 64))


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("0.25", Fraction(0.25)),
        (".5", Fraction(0.5)),
        ("1.0", Fraction(1.0)),
        ("1.", Fraction(1.0)),
        ("1e-3", Fraction(0.001)),
        ("1", Entries(1)),
        (" 2048 ", Entries(2048)),
        ("512MiB", Bytes(512 * 1024 * 1024)),
        ("2gb", Bytes(2 * 10**9)),
        ("1.5KiB", Bytes(1536)),
        ("10 KB", Bytes(10**4)),
        ("1048576B", Bytes(2**20)),
    ],
)
def test_the_unit_is_read_from_the_text(text, budget):
    assert read_budget(text) == budget
    assert read_budget(str(budget)) == budget


@pytest.mark.parametrize(
    "text", ["", "0", "0.0", "1.5", "-1", "-0.5", "12XB", "MiB", "1,5", "nan", "inf", "0B", "0x10"]
)
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(ValueError, match=r"keep must be in|at least 1|cannot read|must be positive"):
        read_budget(text)


@pytest.mark.parametrize(("keep", "seen", "count"), [(0.29, 100, 29), (0.25, 103, 25), (1.0, 97, 97), (0.07, 100, 7)])
def test_a_fraction_is_rounded_down_but_not_by_rounding_errors(keep, seen, count):
    assert Fraction(keep).entries(seen, 5, NOTHING) == count
    assert Fraction(keep).entries(seen, 98, NOTHING) == 98  # sinks and window stay


@given(st.floats(1e-6, 1), st.integers(1, 10**6), st.integers(0, 50), st.integers(0, 50))
def test_a_fraction_grows_with_the_tokens_and_is_never_below_what_is_protected(keep, seen, protected, more):
    budget = Fraction(keep)
    count = budget.entries(seen, protected, NOTHING)
    assert protected <= count <= max(seen, protected)
    assert count <= budget.entries(seen + more, protected, NOTHING)
    assert read_budget(str(budget)) == budget


@given(st.integers(1, 10**6), st.integers(0, 10**6), footprints)
@example(4, 5, NOTHING)
@example(5, 5, NOTHING)
def test_entries_are_what_they_say_or_refused(count, protected, footprint):
    if count < protected:
        with pytest.raises(ValueError, match=f"raise it to at least {protected}"):
            Entries(count).entries(7, protected, footprint)
    else:
        assert Entries(count).entries(7, protected, footprint) == count


@given(st.integers(1, 10**12), st.integers(1, 10**4), st.integers(0, 50), footprints)
@example(3, 2, 5, NOTHING)  # a short prompt, all of which fits
@example(1, 2, 5, NOTHING)
def test_bytes_are_never_exceeded_and_never_wasted(size, seen, protected, footprint):
    """The count is the largest that fits; a budget that cannot hold sinks and window names the least that can."""

    def held(count: int) -> int:
        return footprint.fixed_bytes + count * footprint.entry_bytes * footprint.rows

    least = held(min(protected, seen))
    if size < least:
        with pytest.raises(ValueError, match=f"the least possible is {least} bytes"):
            Bytes(size).entries(seen, protected, footprint)
    else:
        count = Bytes(size).entries(seen, protected, footprint)
        assert held(count) <= size < held(count + 1)
    assert read_budget(str(Bytes(size))) == Bytes(size)

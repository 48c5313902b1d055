"""The only place where entries are dropped and stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from build import first_round, second_round
from kvest.propose import H2O
from kvest.random import Stream
from kvest.retain import Store, retain
from kvest.sample import Poisson
from kvest.types import Retained

COUNTS = ((5, 2, 11), (7, 3, 3))


def retained(generator: torch.Generator, counts=COUNTS, history: bool = True) -> Retained:
    s = sum(sum(row) for row in counts)
    return Retained(
        keys=1 + torch.randn(s, 13, generator=generator),
        values=1 + torch.randn(s, 7, generator=generator),
        log_weights=torch.rand(s, generator=generator),
        positions=torch.cat(
            [torch.randperm(50, generator=generator)[:n].sort().values for row in counts for n in row]
        ).int(),
        counts=counts,
        history=torch.rand(s, generator=generator) if history else None,
    )


def append(store: Store, generator: torch.Generator, start: int, n: int, exists: torch.Tensor | None = None):
    keys = 1 + torch.randn(store.rows, store.heads, n, 13, generator=generator)
    values = 1 + torch.randn(store.rows, store.heads, n, 7, generator=generator)
    positions = start + torch.arange(n).expand(store.rows, n)
    store.append(keys, values, positions, exists)
    return keys, values, positions


def same(one: Retained, other: Retained) -> bool:
    names = ("keys", "values", "log_weights", "positions", "history")
    return one.counts == other.counts and all(torch.equal(getattr(one, n), getattr(other, n)) for n in names)


def heads(store: Store):
    return [(row, head) for row in range(store.rows) for head in range(store.heads)]


def parts(store: Store, row: int, head: int) -> list[torch.Tensor]:
    return [store.head(x, row, head) for x in (store.keys, store.values, store.log_weights, store.positions)]


@pytest.mark.parametrize("make", [first_round, second_round])
def test_what_is_kept_is_copied_and_the_rest_is_gone(make, generator):
    """Entry by entry: keys, values, positions, history, and log weights old plus new; storage of its own, no larger."""
    o = make(generator)
    proposal = replace(H2O()(o), certain=o.protected)
    draw = Poisson()(proposal, o.valid, o.budget[:, None].expand(2, 3), o.positions, Stream(0, 0, [0, 0]))
    added = torch.rand(o.log_weights.shape, generator=generator)
    kept, at = retain(o, draw, added, proposal), 0
    for row in range(2):
        for head in range(3):
            mine = draw.keep[row, head]
            n = int(mine.sum())
            assert kept.counts[row][head] == n
            part = slice(at, at + n)
            assert torch.equal(kept.keys[part], o.keys[row, head, mine])
            assert torch.equal(kept.values[part], o.values[row, head, mine])
            assert torch.equal(kept.positions[part].long(), o.positions[row, head, mine])
            assert torch.equal(kept.log_weights[part], o.log_weights[row, head, mine] + added[row, head, mine])
            assert torch.equal(kept.history[part], proposal.history[row, head, mine])
            assert (kept.positions[part].diff() > 0).all()
            at += n
    assert at == len(kept.keys)
    for x in (kept.keys, kept.values, kept.log_weights, kept.positions):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
    assert retain(o, draw, added).history is None


@pytest.mark.parametrize("history", [True, False])
def test_appended_entries_come_last_and_are_exact(history, generator):
    """Many appends of 1 and of several entries, through several growths: what each head holds, entry by entry."""
    given = retained(generator, history=history)
    store, want = Store(given), {}
    for row, head in heads(store):
        want[row, head] = [x.clone() for x in parts(store, row, head)]
    start = 50
    for n in (1, 1, 3, 17, 1, 40, 1, 1, 2):
        keys, values, positions = append(store, generator, start, n)
        start += n
        for row, head in heads(store):
            new = (keys[row, head], values[row, head], torch.zeros(n), positions[row].int())
            want[row, head] = [torch.cat(pair) for pair in zip(want[row, head], new, strict=True)]
            got = parts(store, row, head)
            assert all(torch.equal(a, b) for a, b in zip(got, want[row, head], strict=True))
            assert (got[3].diff() > 0).all()
            if history:
                assert not store.head(store.history, row, head)[-n:].any()
        free = torch.ones(len(store.keys), dtype=torch.bool)
        free[store.taken()] = False
        assert (store.log_weights[free] == -torch.inf).all()
        assert len(store.keys) <= sum(n + max(16, n // 64) for n in store.lengths)


def test_padding_is_not_stored(generator):
    """Where `exists` is False nothing is written, wherever the padding stands; later appends go on behind."""
    store, single = Store(retained(generator)), Store(retained(torch.Generator().manual_seed(1)))
    exists = torch.tensor([[True] * 5, [False, True, False, True, False]])
    before = store.retained()
    keys, values, _ = append(store, generator, 50, 5, exists)
    later, _, _ = append(store, generator, 55, 1)
    assert store.lengths == [n + 6 for n in COUNTS[0]] + [n + 3 for n in COUNTS[1]]
    first = sum(COUNTS[0]) + COUNTS[1][0]
    assert torch.equal(store.head(store.keys, 1, 0)[:7], before.keys[first - 7 : first])
    assert torch.equal(store.head(store.keys, 1, 0)[7:], torch.cat([keys[1, 0, [1, 3]], later[1, 0]]))
    assert torch.equal(store.head(store.values, 1, 2)[3:5], values[1, 2, [1, 3]])
    assert store.head(store.positions, 1, 0)[7:].tolist() == [51, 53, 55]
    assert single.lengths == [n for row in COUNTS for n in row]


def test_crop_takes_back_the_latest_entries(generator):
    """And what is appended afterwards stands in their place; their slots are absent in between."""
    given = retained(generator)
    store = Store(given)
    keys, _, _ = append(store, generator, 50, 5)
    store.cut([n - 3 for n in store.lengths])
    assert store.lengths == [n + 2 for row in COUNTS for n in row]
    assert torch.isinf(store.log_weights).sum() == len(store.keys) - sum(store.lengths)
    for row, head in heads(store):
        assert torch.equal(store.head(store.keys, row, head)[-2:], keys[row, head, :2])
    again, _, _ = append(store, generator, 52, 1)
    for row, head in heads(store):
        assert torch.equal(store.head(store.keys, row, head)[-2:], torch.cat([keys[row, head, 1:2], again[row, head]]))
    store.cut([n - 3 for n in store.lengths])
    assert same(store.retained(), given)
    store.cut([n - 1 for n in store.lengths])
    append(store, generator, 60, 1)
    for row, head in heads(store):  # a new entry inherits nothing from the one whose slot it takes
        assert store.head(store.history, row, head)[-1] == 0
        assert store.head(store.log_weights, row, head)[-1] == 0


def test_rows_can_be_selected_and_repeated(generator):
    """`retained(rows)` is what beam search and a branch need."""
    given = retained(generator)
    store = Store(given)
    append(store, generator, 50, 2)
    whole, first, second = store.retained(), store.retained([0]), store.retained([1])
    for rows in ([0, 1], [1, 0, 1]):
        found = store.retained(rows)
        for name in ("keys", "values", "log_weights", "positions", "history"):
            parts = [getattr((first, second)[row], name) for row in rows]
            assert torch.equal(getattr(found, name), torch.cat(parts))
        assert found.counts == tuple((first, second)[row].counts[0] for row in rows)
    assert first.counts == (tuple(n + 2 for n in COUNTS[0]),)
    assert not same(store.retained([1, 0]), whole)


def test_right_aligned_names_every_slot_once(generator):
    store = Store(retained(generator))
    append(store, generator, 50, 4)
    slots, lengths = store.right_aligned()
    assert slots.shape == (2, 3, 15)
    for row, head in heads(store):
        n = int(lengths[row, head])
        assert n == COUNTS[row][head] + 4
        assert torch.equal(store.keys[slots[row, head, 15 - n :]], store.head(store.keys, row, head))
        assert not slots[row, head, : 15 - n].any()
    taken = torch.cat([slots[row, head, 15 - lengths[row, head] :] for row, head in heads(store)])
    assert torch.equal(taken, store.taken())


@pytest.mark.parametrize(("counts", "runs"), [(((4, 4), (4, 4)), 1), (((4, 4), (2, 3)), 3), (((4, 2), (4, 2)), 4)])
def test_runs_are_views_of_neighbours_with_equal_storage(counts, runs, generator):
    """They share the store's memory, cover all heads in order, and follow every append. Room is owned in steps of 16:
    after the first append these small heads are all equal."""
    store = Store(retained(generator, counts))
    for start in (50, 51):
        found = store.runs()
        assert len(found) == (runs if start == 50 else 1)
        assert [i for run in found for i in range(run.heads.start, run.heads.stop)] == list(range(4))
        for run in found:
            for view, whole in ((run.keys, store.keys), (run.values, store.values), (run.bias, store.log_weights)):
                assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            for i in range(run.heads.start, run.heads.stop):
                held = store.head(store.keys, i // 2, i % 2)
                assert torch.equal(run.keys[0, i - run.heads.start, : len(held)], held)
                weights = run.bias[0, i - run.heads.start, 0]
                assert torch.isfinite(weights).tolist() == [True] * len(held) + [False] * (len(weights) - len(held))
        append(store, generator, start, 1)


def test_appending_changes_nothing_of_what_the_store_was_made_from(generator):
    """Two stores of one Retained are two branches: neither sees the other's tokens, crops or rows."""
    given = retained(generator)
    names = ("keys", "values", "log_weights", "positions", "history")
    before = replace(given, **{n: getattr(given, n).clone() for n in names})
    one, other, cropped = Store(given), Store(given), Store(given)
    cropped.cut([n - 2 for n in cropped.lengths])
    append(cropped, generator, 48, 2)
    append(one, generator, 50, 3)
    append(other, generator, 50, 30)
    one.cut([n - 1 for n in one.lengths])
    snapshot = one.retained()
    kept = snapshot.keys.clone()
    append(one, generator, 52, 1)
    one.cut([n - 3 for n in one.lengths])
    assert same(given, before)
    assert torch.equal(snapshot.keys, kept)
    assert same(one.retained(), before)


def test_an_append_that_is_interrupted_can_be_taken_back(generator):
    """Whatever was written of it: a cut to the lengths before leaves the entries and the places as they were."""
    store = Store(Retained(**packed(generator), counts=((11, 5),)))
    new = torch.randn(1, 2, 3, 8, generator=generator)
    store.append(new, new, 100 + torch.arange(3)[None])
    lengths, before = list(store.lengths), store.retained()
    with pytest.raises(RuntimeError):  # values of another width: keys are written already
        store.append(new, torch.randn(1, 2, 3, 7, generator=generator), 103 + torch.arange(3)[None])
    store.cut(lengths)
    store.append(new, new, 103 + torch.arange(3)[None])
    after = store.retained()
    for head in range(2):
        assert store.head(store.positions, 0, head)[-3:].tolist() == [103, 104, 105]
        assert torch.equal(store.head(store.keys, 0, head)[-3:], new[0, head])
    store.cut(lengths)
    for name in ("keys", "values", "log_weights", "positions"):
        assert torch.equal(getattr(store.retained(), name), getattr(before, name))
    assert after.counts == ((17, 11),)


def packed(generator):
    return {
        "keys": torch.randn(16, 8, generator=generator),
        "values": torch.randn(16, 8, generator=generator),
        "log_weights": torch.rand(16, generator=generator),
        "positions": torch.arange(16, dtype=torch.int32),
    }

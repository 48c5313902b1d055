"""Random policies on random batches, fed in random pieces, against the float64 twin and the rules of the cache.

The same examples in every run; `FUZZ_EXAMPLES=1000 pytest tests/test_fuzz.py` looks at other ones.
"""

from __future__ import annotations

import functools
import gc
import os
import types
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedConfig

import kvest
from hf_tools import HEADS, Pieces, feed, same_entries, tokens
from kvest.allocate import ALLOCATIONS
from kvest.budget import Bytes, Entries, Fraction
from kvest.correct import CORRECTIONS
from kvest.policy import Policy
from kvest.propose import PROPOSALS
from kvest.sample import DESIGNS

MORE = os.environ.get("FUZZ_EXAMPLES")
ENTRY_BYTES = 2 * 8 * 4 + 8  # of a head of the tiny models: key, value, log weight, position
HISTORY_BYTES = 4


def maker(table, name, **knobs):
    return st.builds(table[name], **knobs)


SIZES = st.sampled_from([1, 2, 7, 64])
LEAVES = {
    "uniform": {},
    "streaming": {},
    "key_norm": {},
    "keydiff": {},
    "last_query": {"values": st.booleans(), "layer": st.booleans()},
    "snapkv": {"window": SIZES, "pool": st.sampled_from([1, 3, 5])},
    "h2o": {"values": st.booleans(), "divide": st.booleans()},
    "harmonic": {"rows": st.one_of(st.none(), SIZES), "values": st.booleans()},
    "output_error": {"rows": SIZES},
    "capkv": {"form": st.sampled_from(["authors", "paper"]), "ahead": SIZES},
    "capkv_greedy": {"form": st.sampled_from(["authors", "paper"]), "ahead": SIZES},
    "value_norm": {},
    "value_range": {},
    "lagkv": {"lag": SIZES, "peer": st.booleans()},
    "expected_attention": {"ahead": SIZES, "covariance": st.booleans(), "peer": st.booleans()},
    "leverage": {"sketch": SIZES},
    "noncausal": {"chunk": SIZES, "peer": st.booleans()},
    "compactor": {"sketch": SIZES, "chunk": SIZES},
    "curdkv": {"rank": SIZES, "peer": st.booleans()},
    "lava": {"window": SIZES, "pool": st.sampled_from([1, 3, 5])},
}
ONE_DRAW = st.sampled_from([DESIGNS[name]() for name in ("poisson", "systematic", "stratified", "pivotal")])
CLUSTERED = st.builds(DESIGNS["clusters"], design=ONE_DRAW, size=st.sampled_from([1, 3, 8]))
DESIGN_KNOBS = {
    "with_replacement": {"most": st.sampled_from([1, 16])},
    "clusters": {"design": ONE_DRAW, "size": st.sampled_from([1, 3, 8])},
    "best_of": {"design": st.one_of(ONE_DRAW, CLUSTERED), "n": st.sampled_from([1, 3]), "rows": SIZES},
}
CORRECTION_KNOBS = {
    "tempered": {
        "tau": st.sampled_from([0.0, 0.5, 0.85, 1.0, "auto"]),
        "of": st.sampled_from(["inclusion", "counts"]),
        "rows": SIZES,
    }
}
SHARES = st.sampled_from([0.0, 0.2, 0.5, 1.0])


def wrapped(inner):
    return st.one_of(
        maker(PROPOSALS, "mixed", proposal=inner, eps=SHARES),
        maker(PROPOSALS, "with_certain", proposal=inner, by=inner, share=SHARES),
        maker(PROPOSALS, "sharp", proposal=inner, c=st.sampled_from([0.5, 1.3])),
        maker(PROPOSALS, "chunked", proposal=inner, size=SIZES, layer=st.booleans()),
        maker(PROPOSALS, "critical", proposal=inner, first=SHARES),
        maker(PROPOSALS, "defensive", proposal=inner.filter(lambda proposal: proposal.attends)),
    )


def of(table, knobs):
    return st.one_of([maker(table, name, **knobs.get(name, {})) for name in table])


PROPOSED = st.recursive(
    st.one_of([maker(PROPOSALS, name, **knobs) for name, knobs in LEAVES.items()]), wrapped, max_leaves=3
)


@dataclass(frozen=True)
class Example:
    """A policy, and what its cache is fed: `real[n][row]` of piece n's `columns[n]` tokens, padding in front."""

    policy: Policy
    heads: tuple[int, int]
    layers: int
    columns: list[int]
    real: list[list[int]]
    seed: int

    @property
    def rows(self) -> int:
        return len(self.real[0])


@st.composite
def examples(draw):
    heads, layers, rows = (
        draw(st.sampled_from(sorted(HEADS.values()))),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
    )
    columns = [draw(st.integers(1, 90)), *draw(st.lists(st.sampled_from([1, 1, 1, 2, 5, 33]), min_size=2, max_size=6))]
    real = []
    for number, n in enumerate(columns):
        some = st.one_of(st.just(n), st.integers(min(1, n) if number == 0 else 0, n))
        real.append([draw(some) for _ in range(rows)])
    sinks, window = draw(st.sampled_from([0, 1, 4])), draw(st.sampled_from([1, 5, 16]))
    count = draw(st.integers(sinks + window, 80))
    budget = draw(
        st.one_of(
            st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0]).map(Fraction),
            st.just(Entries(count)),
            st.integers(0, 99).map(
                lambda more: Bytes(count * (ENTRY_BYTES + HISTORY_BYTES) * layers * heads[1] * rows + more)
            ),
        )
    )
    propose = draw(PROPOSED)
    design = DESIGNS["top_k"]() if propose.deterministic_only else draw(of(DESIGNS, DESIGN_KNOBS))
    correct = draw(of(CORRECTIONS, CORRECTION_KNOBS)) if design.random else CORRECTIONS["none"]()
    every = draw(st.one_of(st.none(), st.integers(1, 9)))
    policy = Policy(
        propose, design, correct, budget, draw(of(ALLOCATIONS, {})), every=every, sinks=sinks, window=window
    )
    return Example(policy, heads, layers, columns, real, draw(st.integers(0, 2**31)))


@pytest.fixture(scope="module")
def model_of(tiny_model):
    """(heads, layers) -> a model, made once."""
    return functools.cache(lambda heads, layers: tiny_model(heads=heads[0], kv_heads=heads[1], layers=layers))


def budget_of(example: Example, seen: int) -> int:
    """Entries per head that a row's budget means, written down once more."""
    policy, budget = example.policy, example.policy.budget
    if isinstance(budget, Fraction):
        return max(int(budget.keep * seen + 1e-9), policy.sinks + policy.window)
    if isinstance(budget, Entries):
        return budget.count
    carried = HISTORY_BYTES if policy.every and policy.propose.carries else 0
    return budget.size // ((ENTRY_BYTES + carried) * example.layers * example.heads[1] * example.rows)


def reached(cache: kvest.EvictionCache) -> int:
    """Bytes of all storages that can be reached from the cache, whatever attributes they hang on; not the model's."""
    seen: dict[int, object] = {}
    storages: dict[int, int] = {}
    todo: list[object] = [cache]
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, type | types.ModuleType | types.FunctionType | nn.Module | PreTrainedConfig):
            continue
        seen[id(x)] = x
        if isinstance(x, Tensor):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        else:
            todo += gc.get_referents(x)
    return sum(storages.values())


def check_size(example: Example, before: kvest.Report | None, after: kvest.Report, row: int, added: int) -> None:
    """The budget holds when it must, exactly where the design's size is; otherwise everything new is there."""
    policy, seen = example.policy, int(after.seen[row])
    budget = budget_of(example, seen)
    had = 0 if before is None else int(before.kept[:, row].sum())
    kept, heads = int(after.kept[:, row].sum()), example.layers * example.heads[1]
    rounds = after.evictions[row] - (0 if before is None else before.evictions[row])
    assert rounds in (0, 1)
    if rounds == 0:
        assert kept == had + added * heads
    if rounds and policy.design.fixed_size and not isinstance(policy.allocate, ALLOCATIONS["pyramid"]):
        assert kept == budget * heads
    if policy.design.fixed_size and (before is None or (policy.every and added > 1)):
        assert kept <= budget * heads
    if policy.design.fixed_size and policy.every and policy.every > 1:
        assert kept < (budget + policy.every) * heads
    if policy.every is None and before is not None:
        assert rounds == 0


def check_head(example: Example, seen: int, where: Tensor, weight: Tensor, old: dict[int, float] | None, fresh: int):
    policy, positions = example.policy, where.tolist()
    assert positions == sorted(set(positions))
    assert set(range(min(policy.sinks, seen))) <= set(positions) <= set(range(seen))
    assert positions[-min(policy.window, seen) :] == list(range(max(seen - policy.window, 0), seen))
    assert torch.isfinite(weight).all()
    certain = (where < policy.sinks) | (where >= seen - policy.window)
    assert not weight[certain].any()
    if not policy.correct.corrects:
        assert not weight.any()
    counted = "counts" in str(policy.correct).lower() and type(policy.design).__name__ == "WithReplacement"
    if not counted:  # drawn less often than expected: a count's weight may be below 1
        assert (weight >= 0).all()
    if old is not None:
        kept = {p: w for p, w in zip(positions, weight.tolist(), strict=True) if p < fresh}
        assert kept.keys() <= old.keys(), "what is gone never comes back"
        if not counted:
            assert all(w >= old[p] for p, w in kept.items())


def check(example: Example, before: kvest.Report | None, after: kvest.Report, row: int, added: int) -> None:
    """The rules that hold for one row between two reports."""
    check_size(example, before, after, row, added)
    seen = int(after.seen[row])
    for layer in range(example.layers):
        for head in range(example.heads[1]):
            old = None
            if before is not None:
                held = before.positions[layer][row][head].tolist(), before.log_weights[layer][row][head].tolist()
                old = dict(zip(*held, strict=True))
            where, weight = after.positions[layer][row][head], after.log_weights[layer][row][head]
            check_head(example, seen, where, weight, old, seen - added)


def alone(model, example: Example, ids: list[Tensor], row: int) -> Pieces:
    """The row fed without the others; its share of a budget of bytes."""
    policy = example.policy
    if isinstance(policy.budget, Bytes):
        policy = replace(policy, budget=Bytes(policy.budget.size // example.rows))
    pieces = Pieces(model, kvest.EvictionCache(model, policy, example.seed))
    for piece, real in zip(ids, example.real, strict=True):
        if real[row]:
            pieces.feed(piece[row : row + 1, piece.shape[1] - real[row] :])
    return pieces


@settings(
    max_examples=int(MORE or 40),
    derandomize=MORE is None,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(example=examples())
def test_any_policy_on_any_batch_in_any_pieces(model_of, example):
    """Rules after every piece, each row as alone, and alone as the twin that has no cache."""
    model = model_of(example.heads, example.layers)
    generator = torch.Generator().manual_seed(example.seed)
    cache = kvest.EvictionCache(model, example.policy, example.seed)
    ids, logits = [tokens(generator, n, example.rows) for n in example.columns], []
    mask = torch.zeros(example.rows, 0, dtype=torch.long)
    before = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "two passes of")
        for piece, real in zip(ids, example.real, strict=True):
            n = piece.shape[1]
            mask = torch.cat([mask, (torch.arange(n) >= n - torch.tensor(real)[:, None]).long()], dim=1)
            logits.append(feed(model, cache, piece, mask))
            after = cache.report()
            for row in range(example.rows):
                check(example, before, after, row, real[row])
            assert after.kept_bytes == reached(cache)
            before = after
        for row in range(example.rows):
            single = alone(model, example, ids, row)
            same_entries(after, row, single.cache.report(), 0, 1e-4)
            got = torch.cat([x[row, x.shape[1] - r[row] :] for x, r in zip(logits, example.real, strict=True)])
            want = torch.cat(single.logits, dim=1)[0]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            single.check(5e-5)

"""What every entry of the tables must do: a new method is tested here as soon as it is registered."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from build import default, first_round, made_round, part, second_round
from kvest.allocate import ALLOCATIONS
from kvest.budget import Bytes, Entries, Fraction
from kvest.correct import CORRECTIONS
from kvest.grammar import say
from kvest.policy import Policy
from kvest.propose import PROPOSALS
from kvest.random import Stream
from kvest.rotary import Rotation
from kvest.sample import DESIGNS
from kvest.stand_in import STAND_INS
from kvest.types import Observation

HALVES = [torch.bfloat16, torch.float16]


TABLES = (PROPOSALS, ALLOCATIONS, DESIGNS, CORRECTIONS, STAND_INS)
PARTS = [default(kind) for table in TABLES for kind in table.values()]
PROPOSED = [default(kind) for kind in PROPOSALS.values()]
DESIGNED = [default(kind) for kind in DESIGNS.values()]
CORRECTED = [default(kind) for kind in CORRECTIONS.values()] + [CORRECTIONS["tempered"]("auto")]
STOOD_IN = [
    STAND_INS["centroids"](),
    STAND_INS["centroids"](3, 0.5, 7),
    STAND_INS["merge"](0.5, False),
    STAND_INS["moments"]("mean", 9),
]
every_proposal = pytest.mark.parametrize("propose", PROPOSED, ids=say)
every_round = pytest.mark.parametrize("make", [first_round, second_round, made_round])


def to(observation: Observation, dtype: torch.dtype) -> Observation:
    return replace(observation, **{n: getattr(observation, n).to(dtype) for n in ("queries", "keys", "values")})


def check(score: torch.Tensor, observation: Observation) -> None:
    assert score.dtype == torch.float32
    assert torch.isfinite(score).all()
    assert (score >= 0).all()
    assert not score[~observation.valid].any()
    assert (score.sum(-1) > 0)[observation.lengths > 0].all()


@pytest.mark.parametrize("part", PARTS, ids=lambda x: f"{type(x).__name__}")
def test_a_part_is_a_frozen_dataclass_whose_repr_is_its_record(part):
    import kvest.allocate
    import kvest.correct
    import kvest.propose
    import kvest.sample
    import kvest.stand_in

    stages = (kvest.propose, kvest.allocate, kvest.sample, kvest.correct, kvest.stand_in)
    names = {name: x for stage in stages for name, x in vars(stage).items()}
    assert eval(repr(part), names) == part
    assert hash(part) == hash(replace(part))
    with pytest.raises(FrozenInstanceError):
        part.another = 1


@every_proposal
@every_round
def test_scores_are_finite_and_not_negative_and_0_on_missing_slots(propose, make, generator):
    observation = make(generator)
    proposal = propose(observation)
    check(proposal.score, observation)
    assert not (proposal.certain & ~observation.valid).any()


@every_proposal
@every_round
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_alone_equals_the_row_in_a_batch(propose, make, row, generator):
    """In a batch it has more padding in front, of entries and of queries, filled with garbage."""
    observation = make(generator)
    alone = part(observation, row)
    t = alone.keys.shape[2]
    batched, single = propose(observation), propose(alone)
    torch.testing.assert_close(batched.score[row : row + 1, :, -t:], single.score)
    assert torch.equal(batched.certain[row : row + 1, :, -t:], single.certain)
    if single.history is not None:
        torch.testing.assert_close(batched.history[row : row + 1, :, -t:], single.history)


@every_proposal
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_gives_float32_scores_near_those_of_float32(propose, dtype, generator):
    """Scores of the same rounded numbers: the arithmetic is in float32 or better, whatever the input."""
    observation = to(second_round(generator), dtype)
    got, want = propose(observation).score, propose(to(observation, torch.float32)).score
    check(got, observation)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@every_proposal
def test_equal_entries_have_equal_scores(propose, generator):
    """All entries and queries are the same, never rotated, and every query has seen all: nothing tells them apart."""
    observation = first_round(generator, lengths=(17,), rotation=Rotation(lambda: (torch.empty(0), 1.0)))
    same = {n: getattr(observation, n)[..., :1, :].expand_as(getattr(observation, n)) for n in ("keys", "values")}
    observation = replace(
        observation, **same, queries=observation.queries[:, :, :, -1:], query_lengths=torch.tensor([1])
    )
    observation = replace(observation, prepared=torch.full_like(observation.prepared, 0.7))
    observation = replace(observation, seen=torch.tensor([10**6]))  # far away: no entry is recent
    score = propose(observation).score
    middle = score[:, :, 2:]  # the first two are sinks
    if not propose.exchangeable:
        assert (middle.amax(-1) > 1.01 * middle.amin(-1)).all()
        return
    torch.testing.assert_close(middle, middle[..., :1].expand_as(middle), rtol=1e-3, atol=1e-6)


@every_proposal
def test_one_entry(propose, generator):
    observation = first_round(generator, lengths=(1,))
    score = propose(observation).score
    assert score.shape == (1, 3, 1)
    assert torch.isfinite(score).all()
    assert (score >= 0).all()


@every_proposal
@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_large_and_small_norms_stay_finite(propose, size, generator):
    observation = second_round(generator)
    scaled = {n: getattr(observation, n) * size for n in ("queries", "keys", "values")}
    check(propose(replace(observation, **scaled)).score, observation)


@every_proposal
def test_a_row_that_is_still_all_padding_is_empty_and_harmless(propose, generator):
    """The first chunk of a left-padded prompt may hold nothing of a short row; the other row does not notice."""
    observation = first_round(generator, lengths=(19, 13))
    empty = replace(
        observation,
        lengths=torch.tensor([[19] * 3, [0] * 3]),
        query_lengths=torch.tensor([19, 0]),
        seen=torch.tensor([19, 0]),
        positions=observation.positions - torch.tensor([0, 13])[:, None, None],
    )
    got, want = propose(empty), propose(part(observation, 0))
    check(got.score, empty)
    torch.testing.assert_close(got.score[:1], want.score)
    assert not got.certain[1].any()


@every_proposal
def test_a_row_without_new_queries_is_harmless(propose, generator):
    """A row may get only padding while others go on."""
    observation = replace(second_round(generator), query_lengths=torch.tensor([11, 0]))
    score = propose(observation).score
    assert torch.isfinite(score).all()
    assert not score[~observation.valid].any()
    torch.testing.assert_close(score[:1], propose(part(observation, 0)).score)


@pytest.mark.parametrize("design", DESIGNED, ids=say)
@pytest.mark.parametrize("allocate", [default(kind) for kind in ALLOCATIONS.values()], ids=say)
@every_round
def test_every_allocation_with_every_design(design, allocate, make, generator):
    """Counts lie between what is certain and what is there; draws are consistent; rows do not notice each other."""
    layers = [make(generator), make(generator)]
    policy = Policy(PROPOSALS["h2o"](values=True), design, CORRECTIONS["none"](), Fraction(0.5), allocate)
    streams = [Stream(7, layer, [3, 5]) for layer in range(2)]
    proposals = [policy.proposal(o) for o in layers]
    counts = allocate(proposals, layers, design)
    parts = [[part(o, row) for o in layers] for row in (0, 1)]
    rows = [allocate([policy.proposal(o) for o in row], row, design) for row in parts]
    for layer, (o, proposal, count, stream) in enumerate(zip(layers, proposals, counts, streams, strict=True)):
        assert (count >= proposal.certain.sum(-1)).all()
        assert (count <= o.lengths).all()
        draw = design(proposal, o.valid, count, o.positions, stream)
        assert (draw.keep | ~proposal.certain).all()
        assert not (draw.keep & ~o.valid).any()
        assert (draw.inclusion[proposal.certain] == 1).all()
        assert (draw.inclusion[draw.keep] > 0).all()
        assert torch.equal(draw.keep, draw.multiplicity > 0)
        if design.fixed_size:
            assert torch.equal(draw.keep.sum(-1), count)
        else:
            assert (draw.inclusion.sum(-1) <= count.double() + 1e-9).all()
        for row in (0, 1):
            one, mine = parts[row][layer], replace(stream, rounds=[(3, 5)[row]])
            alone = design(policy.proposal(one), one.valid, rows[row][layer], one.positions, mine)
            assert torch.equal(rows[row][layer][0], count[row])
            assert torch.equal(alone.keep[0], draw.keep[row, :, -one.keys.shape[2] :])


@pytest.mark.parametrize("correct", CORRECTED, ids=say)
@pytest.mark.parametrize("design", DESIGNED, ids=say)
@every_round
def test_every_correction_of_every_design(correct, design, make, generator):
    """Finite float32, 0 on what is not kept and on what was certain."""
    o = make(generator)
    proposal = default(PROPOSALS["mixed"])(o)
    proposal = replace(proposal, certain=o.protected)
    draw = design(proposal, o.valid, o.budget[:, None].expand(2, 3), o.positions, Stream(0, 0, [0, 0]))
    log_weights = correct(draw, o)
    assert log_weights.dtype == torch.float32
    assert torch.isfinite(log_weights).all()
    assert not log_weights[~draw.keep | proposal.certain].any()
    assert (log_weights > 0).any() == (design.random and correct.corrects)


def combinations():
    """Every proposal, allocation, design and correction, with other knobs too; budgets and options take turns."""
    mixed, certain = PROPOSALS["mixed"], PROPOSALS["with_certain"]
    proposed = [
        *PROPOSED,
        mixed(PROPOSALS["snapkv"](7, 3)),
        mixed(certain(PROPOSALS["h2o"](True, False), PROPOSALS["keydiff"](), 0.5)),
        certain(PROPOSALS["h2o"](), PROPOSALS["streaming"]()),
        PROPOSALS["last_query"](False, True),
        PROPOSALS["capkv"]("paper", 2.5, 7),
        PROPOSALS["capkv"](ahead=7),
        PROPOSALS["snapkv"](pool=3),
        PROPOSALS["harmonic"](256, False),
    ]
    corrected = [*CORRECTED, CORRECTIONS["tempered"](0.5, "counts"), CORRECTIONS["tempered"](1.0, "inclusion", 8)]
    budgets = [Fraction(0.25), Fraction(1.0), Entries(64), Bytes("3MiB"), Bytes(1001)]
    options = [{}, {"every": 5}, {"sinks": 0, "window": 1}, {"every": 7, "sinks": 8, "window": 32}]
    stand_ins = [{"stand_in": x} for x in (STAND_INS["none"](), *STOOD_IN)]
    turns = itertools.cycle(itertools.product(budgets, options, stand_ins))
    for propose, kind, design, correct in itertools.product(proposed, ALLOCATIONS.values(), DESIGNED, corrected):
        budget, option, stand_in = next(turns)
        try:
            yield Policy(propose, design, correct, budget, default(kind), **option, **stand_in)
        except ValueError:
            impossible = (
                propose.deterministic_only and design.random,
                correct.corrects and not design.random,
                stand_in["stand_in"].shares and not (design.random and correct.corrects),
                propose.extra_passes and "every" in option,
            )
            assert any(impossible)


def test_every_policy_reads_back_from_its_text():
    """`Policy.parse(str(policy)) == policy` for each combination of parts that is allowed."""
    policies = list(combinations())
    assert len(policies) > 500
    for policy in policies:
        assert Policy.parse(str(policy)) == policy, str(policy)

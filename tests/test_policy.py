"""The sentence that joins the stages: what can be said, and what the reader says back."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from build import second_round
from kvest.budget import Bytes, Entries, Fraction
from kvest.correct import Inclusion, Tempered
from kvest.grammar import PolicyError
from kvest.policy import Policy
from kvest.propose import H2O, KeyDiff, Mixed, Sharp, SnapKV, WithCertain
from kvest.random import Stream
from kvest.sample import BestOf, Clusters, Poisson, Systematic, TopK


def test_a_policy_is_read_part_by_part():
    propose = "with_certain(mixed(snapkv(7, pool=3), .1), by=keydiff, share=0.4)"
    policy = Policy.parse(f"{propose}+one_threshold/systematic/tempered(0.5, of=counts)@0.25, every=64, sinks=2")
    assert policy.propose == WithCertain(Mixed(SnapKV(7, 3), 0.1), KeyDiff(), 0.4)
    assert policy.allocate.whole_model
    assert policy.design == Systematic()
    assert policy.correct == Tempered(0.5, "counts")
    assert (policy.budget, policy.every, policy.sinks, policy.window) == (Fraction(0.25), 64, 2, 16)


def test_designs_are_arguments_too():
    policy = Policy.parse("sharp(snapkv)/best_of(clusters(design=poisson, size=3), n=16)/inclusion@0.25")
    assert policy.propose == Sharp(SnapKV(), 1.3)
    assert policy.design == BestOf(Clusters(Poisson(), 3), 16)
    assert str(policy) == "sharp(snapkv)/best_of(clusters(poisson, 3), 16)/inclusion@0.25"
    assert Policy.parse("critical(h2o, first=0.2)/clusters(top_k)/none@64").design == Clusters(TopK())


def test_spaces_mean_nothing_and_keys_may_stand_in_any_order():
    said = " h2o ( values = True ) / systematic/ inclusion @ 512MiB , window=8 , sinks=1"
    assert Policy.parse(said) == Policy(H2O(values=True), Systematic(), Inclusion(), Bytes("512MiB"), sinks=1, window=8)
    assert Policy.parse("snapkv(pool=3, window=7)/top_k/none@64").propose == SnapKV(7, 3)


def test_fields_override_what_the_text_says():
    policy = Policy.parse("snapkv/top_k/none@0.25, every=5, sinks=1", every=64, window=3, budget=Entries(9))
    assert (policy.every, policy.sinks, policy.window, policy.budget) == (64, 1, 3, Entries(9))


WRONG = {  # text with a | where the caret belongs -> what is said
    "|snapk/top_k/none@0.25": "no proposal 'snapk'. Did you mean 'snapkv'? Known: uniform, streaming",
    "snapkv/|topk/none@0.25": "no design 'topk'. Did you mean 'top_k'? Known: top_k, poisson",
    "snapkv/top_k/|non@0.25": "no correction 'non'. Did you mean 'none'?",
    "snapkv+|one_treshold/top_k/none@0.25": "no allocation 'one_treshold'. Did you mean 'one_threshold'?",
    "|zzz/top_k/none@0.25": "no proposal 'zzz'. Known: uniform",
    "mixed(|snapk, 0.2)/top_k/none@0.25": "no proposal 'snapk'. Did you mean 'snapkv'?",
    "snapkv(|windw=3)/top_k/none@0.25": "snapkv has no argument 'windw'. Did you mean 'window'? Known: window, pool",
    "uniform(|3)/top_k/none@0.25": "uniform takes 0 arguments at most (none)",
    "snapkv(3, |window=5)/top_k/none@0.25": "window is given twice",
    "snapkv(window=3, |window=5)/top_k/none@0.25": "window is given twice",
    "snapkv(3, 5, True, |7)/top_k/none@0.25": "snapkv takes 3 arguments at most (window, pool, peer)",
    "|snapkv(window=0)/top_k/none@0.25": "snapkv needs window >= 1",
    "|snapkv(pool=4)/top_k/none@0.25": "an odd pool",
    "|mixed/top_k/none@0.25": "argument: 'proposal'",
    "|mixed(uniform, 1.5)/top_k/none@0.25": "mixed needs 0 <= eps <= 1, not 1.5",
    "|with_certain(uniform, keydiff, -1)/top_k/none@0.25": "with_certain needs 0 <= share <= 1, not -1.0",
    "uniform/poisson/|tempered(1.5)@0.25": "tempered needs 0 <= tau <= 1 or auto, not 1.5",
    "uniform/poisson/|tempered(-0.1)@0.25": "tempered needs 0 <= tau <= 1 or auto, not -0.1",
    "h2o(values=True|(3))/top_k/none@0.25": "expected ',' or ')' in the arguments of h2o",
    "h2o(|values=3)/top_k/none@0.25": "values of h2o must be True or False, not 3",
    "snapkv(|window=abc)/top_k/none@0.25": "window of snapkv must be a whole number, not 'abc'",
    "harmonic(|0.5)/top_k/none@0.25": "rows of harmonic must be a whole number or None, not 0.5",
    "capkv(|form=papers)/top_k/none@0.25": "form of capkv must be authors or paper, not 'papers'",
    "uniform/poisson/tempered(|automatic)@0.25": "tau of tempered must be a number or auto, not 'automatic'",
    "snapkv/|clusters/inclusion@0.25": "argument: 'design'",
    "snapkv/clusters(|sytematic)/inclusion@0.25": "no design 'sytematic'. Did you mean 'systematic'? Known: top_k",
    "snapkv/clusters(|snapkv)/inclusion@0.25": "no design 'snapkv'",
    "snapkv/clusters(|8)/inclusion@0.25": "expected a design here",
    "snapkv/clusters(systematic, |0.5)/inclusion@0.25": "size of clusters must be a whole number, not 0.5",
    "snapkv/clusters(design=systematic, |design=poisson)/inclusion@0.25": "design is given twice",
    "snapkv/|clusters(best_of(systematic))/inclusion@0.25": "write best_of(clusters(...)), not the reverse",
    "snapkv/best_of(clusters(systematic, |sise=3))/inclusion@0.25": "clusters has no argument 'sise'. Did you mean",
    "snapkv/best_of(clusters(systematic|/inclusion@0.25": "expected ',' or ')' in the arguments of clusters",
    "snapkv/|best_of(top_k)/none@0.25": "best_of needs a random design",
    "|defensive(keydiff)/top_k/none@0.25": "wrap an attention-based proposal, as in defensive(snapkv)",
    "h2o(values=|yes(3))/top_k/none@0.25": "not a call of 'yes'",
    "snapkv|": "expected a design, after '/'",
    "snapkv/top_k|": "expected a correction, after '/'",
    "snapkv/top_k/none|": "expected a budget, after '@'",
    "snapkv(3|/top_k/none@0.25": "expected ',' or ')' in the arguments of snapkv",
    "|": "expected a proposal here: a policy is PROPOSE[+ALLOCATE]/DESIGN/CORRECTION[+STAND_IN]@BUDGET",
    "snapkv/top_k/none@|": "cannot read '' as a number of bytes",
    "snapkv/top_k/none@|0": "a budget of entries must be a whole number of at least 1, not 0",
    "snapkv/top_k/none@|0.0": "keep must be in (0, 1], not 0.0",
    "snapkv/top_k/none@|1.5": "keep must be in (0, 1], not 1.5: it is the share that stays (a compression ratio",
    "snapkv/top_k/none@|-1": "cannot read '-1' as a number of bytes: write it like 512MiB",
    "snapkv/top_k/none@|-0.5": "keep must be in (0, 1], not -0.5",
    "snapkv/top_k/none@|12XB": "cannot read '12XB' as a number of bytes",
    "snapkv/top_k/none@|0MiB": "a budget of bytes must be positive",
    "snapkv/top_k/none@0.25, |evry=3": "no option 'evry'. Known: every, sinks, window",
    "snapkv/top_k/none@0.25, every=|0.5": "every must be a whole number, not 0.5",
    "snapkv/top_k/none@0.25, every=|True": "every must be a whole number, not True",
    "snapkv/top_k/none@0.25, every|": "expected a number, after 'every='",
}


@pytest.mark.parametrize("marked", WRONG)
def test_what_cannot_be_read_is_named_and_pointed_at(marked):
    """The message says what is wrong and the next step; the caret stands under the place."""
    text, column = marked.replace("|", ""), marked.index("|")
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text)
    message, shown, caret = str(caught.value).rsplit("\n", 2)
    assert WRONG[marked] in message
    assert shown == f"  {text}"
    assert caret == f"  {' ' * column}^"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("snapkv/top_k/inclusion@0.25", "top_k keeps an entry with probability 0 or 1.*/none.*systematic"),
        ("snapkv/top_k/tempered(auto)@0.25", "the log weight of tempered\\(auto\\) would be 0"),
        ("snapkv/clusters(top_k)/inclusion@0.25", "clusters\\(top_k\\) keeps an entry with probability 0 or 1.*/none"),
        ("sharp(streaming)/poisson/none@0.25", "sharp\\(streaming\\) gives most entries probability 0"),
        ("streaming/systematic/none@0.25", "streaming gives most entries probability 0.*mixed\\(streaming, 0.2\\)"),
        ("with_certain(streaming, keydiff)/poisson/none@0.25", "with_certain.*gives most entries probability 0"),
        ("snapkv/top_k/none@19", "19 entries per head cannot hold 4 sinks and a window of 16: raise it to at least 20"),
        ("snapkv/top_k/none@8, sinks=5, window=4", "at least 9"),
        ("snapkv/top_k/none@0.25, window=0", "window must be at least 1"),
        ("snapkv/top_k/none@0.25, sinks=-1", "sinks must be a whole number of at least 0, not -1"),
        ("snapkv/top_k/none@0.25, window=-1", "window must be a whole number of at least 0, not -1"),
        ("snapkv/top_k/none@0.25, every=0", "every must be a whole number of at least 1, not 0"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(text, said):
    with pytest.raises(ValueError, match=re.compile(said, re.DOTALL)):
        Policy.parse(text)


def test_what_just_goes_together_is_accepted():
    assert Policy.parse("snapkv/top_k/none@20").budget == Entries(20)
    assert Policy.parse("mixed(streaming, 0.2)/systematic/inclusion@1.0").budget == Fraction(1.0)
    assert Policy.parse("streaming/top_k/none@1, sinks=0, window=1, every=1").every == 1
    assert Policy.parse("uniform/poisson/tempered(1)@0.25").correct == Tempered(1.0)
    assert Policy.parse("uniform/poisson/tempered(0)@0.25").correct == Tempered(0.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_refused(value, generator):
    o = second_round(generator)
    keys = o.keys.clone()
    keys[1, 2, -4] = value
    policy = Policy.parse("keydiff/systematic/inclusion@0.25")
    with pytest.raises(ValueError, match=r"keydiff gave NaN or infinite scores.*overflow in float16"):
        policy.evict([replace(o, keys=keys)], [Stream(0, 0, [0, 0])])


def test_history_is_carried_only_by_a_standing_budget(generator):
    o = second_round(generator)
    for text, carried in [("h2o/top_k/none@0.25", False), ("h2o/top_k/none@0.25, every=3", True)]:
        (kept,) = Policy.parse(text).evict([o], [Stream(0, 0, [0, 0])])
        assert (kept.history is not None) == carried


def test_sinks_and_window_stay_in_every_head(generator):
    o = second_round(generator, lengths=((23, 19, 13), (17, 23, 12)), sinks=4, window=5)
    for text in ("key_norm/systematic/inclusion@0.25", "key_norm+one_threshold/top_k/none@0.25"):
        (kept,) = Policy.parse(text).evict([o], [Stream(0, 0, [0, 0])])
        held = iter(kept.positions.tolist())
        for row, counts in enumerate(kept.counts):
            for head, n in enumerate(counts):
                mine = {next(held) for _ in range(n)}
                assert set(o.positions[row, head][o.protected[row, head]].tolist()) <= mine


def test_a_named_policy_is_read_by_its_name():
    assert Policy.parse("snapkv@0.25") == Policy.parse("snapkv/top_k/none@0.25")
    assert str(Policy.parse("kvest@2048, every=64")).endswith("tempered(0.85)@2048, every=64")


@pytest.mark.parametrize(
    "sentence",
    ["output_error(0)/top_k/none@0.5", "harmonic(rows=0)/top_k/none@0.5", "h2o/with_replacement(0)/counts@0.5"],
)
def test_knobs_out_of_range_are_refused_where_they_stand(sentence):
    with pytest.raises(PolicyError, match=r">= 1|at least 1"):
        Policy.parse(sentence)

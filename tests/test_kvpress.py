"""The bridge to kvpress: its presses as proposals. Runs where kvpress is installed: `make test-kvpress`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from build import first_round, part, second_round
from hf_tools import feed, tokens
from kvest.allocate import OneThreshold
from kvest.budget import Fraction
from kvest.correct import NoCorrection, Tempered
from kvest.hf import EvictionCache
from kvest.policy import Policy
from kvest.sample import Systematic, TopK

pytestmark = pytest.mark.filterwarnings("ignore")  # of kvpress and of what it brings along
kvpress = pytest.importorskip("kvpress")

from kvest.integrations.kvpress import proposal  # noqa: E402

PRESSES = {
    "snapkv": kvpress.SnapKVPress(window_size=7),
    "tova": kvpress.TOVAPress(),
    "keydiff": kvpress.KeyDiffPress(),
    "knorm": kvpress.KnormPress(),
    "expected attention": kvpress.ExpectedAttentionPress(),
    "lagkv": kvpress.LagKVPress(lag_size=5),
    "cap": kvpress.CapPress(),
    "cur": kvpress.CURPress(),
    "noncausal": kvpress.NonCausalAttnPress(chunk_size=8),
    "critical": kvpress.CriticalKVPress(kvpress.SnapKVPress(window_size=7)),
}
every_press = pytest.mark.parametrize("press", PRESSES.values(), ids=PRESSES)


def square(observation):
    """kvpress takes values to be as wide as keys."""
    d = observation.keys.shape[3]
    return replace(
        observation,
        values=torch.cat([observation.values, observation.values.flip(-1)], -1)[..., :d],
        output=torch.cat([observation.output, observation.output.flip(-1)], -1)[..., :d],
    )


@every_press
def test_a_row_of_a_batch_is_scored_as_alone(press, generator):
    """Whatever the padding in front of it."""
    observation = square(first_round(generator, lengths=(23, 17)))
    score = proposal(press)(observation).score
    assert score.dtype == torch.float32
    assert torch.isfinite(score).all()
    assert (score >= 0).all()
    assert not score[~observation.valid].any()
    for row in (0, 1):
        alone = part(observation, row)
        torch.testing.assert_close(score[row : row + 1, :, -alone.keys.shape[2] :], proposal(press)(alone).score)


@pytest.mark.parametrize("name", [name for name in PRESSES if name != "lagkv"])  # its scores are ranks, with ties
def test_top_k_keeps_what_the_press_keeps(name, tiny_model, generator):
    """Positions of the bridge's cache against the keys in theirs."""
    from transformers import DynamicCache

    model, prompt = tiny_model(), tokens(generator, 97)
    whole, pressed = DynamicCache(), DynamicCache()
    press = PRESSES[name]
    press.compression_ratio = 0.5
    with torch.no_grad():
        model(prompt, past_key_values=whole)
        with press(model):
            model(prompt, past_key_values=pressed)
    policy = Policy(proposal(press), TopK(), NoCorrection(), Fraction(0.5), sinks=0, window=1)
    cache = EvictionCache(model, policy)
    feed(model, cache, prompt)
    for layer, (full, held, positions) in enumerate(
        zip(whole.layers, pressed.layers, cache.report().positions, strict=True)
    ):
        for head, ours in enumerate(positions[0]):
            where = {tuple(key): i for i, key in enumerate(full.keys[0, head].tolist())}
            theirs = {where[tuple(key)] for key in held.keys[0, head].tolist()}
            missing = theirs - set(ours.tolist())
            assert len(missing) <= (96 not in theirs), f"layer {layer}, head {head}: {sorted(missing)}"


def test_a_press_gains_a_correction_and_real_memory(tiny_model, generator):
    model, prompt = tiny_model(), tokens(generator, 97)
    parts = proposal(kvpress.ExpectedAttentionPress()), Systematic(), Tempered(0.85), Fraction(0.5), OneThreshold()
    cache = EvictionCache(model, Policy(*parts))
    feed(model, cache, prompt)
    report = cache.report()
    assert report.kept.double().mean() == 48
    assert len(report.kept.unique()) > 1
    assert max(float(head.max()) for layer in report.log_weights for head in layer[0]) > 0
    assert report.kept_bytes < 0.75 * report.full_bytes
    assert "ExpectedAttentionPress" in str(report)


def test_softmax_is_another_density_of_the_same_order(generator):
    observation = square(first_round(generator))
    shifted, exponential = (proposal(kvpress.KnormPress(), to)(observation).score for to in ("shift", "softmax"))
    for row, length in enumerate(observation.seen.tolist()):
        order = [x[row, :, -length:].argsort(dim=-1) for x in (shifted, exponential)]
        assert torch.equal(*order)
    torch.testing.assert_close(exponential.sum(-1), torch.ones(2, 3))


def test_what_it_cannot_do_is_said(generator):
    with pytest.raises(ValueError, match=r"AdaKVPress gives no scores.*allocation"):
        proposal(kvpress.AdaKVPress(kvpress.SnapKVPress()))
    with pytest.raises(ValueError, match="h2o is the same score"):
        proposal(kvpress.ObservedAttentionPress())
    with pytest.raises(ValueError, match="leave out every=N"):
        proposal(kvpress.KnormPress())(second_round(generator))


def test_the_press_and_the_model_stay_as_they_were(tiny_model, generator):
    press, model = kvpress.CompactorPress(compression_ratio=0.3), tiny_model()
    before = repr(press)
    cache = EvictionCache(model, Policy(proposal(press), TopK(), NoCorrection(), Fraction(0.5)))
    feed(model, cache, tokens(generator, 97))
    assert repr(press) == before
    assert not any(module._forward_hooks for module in model.modules())

"""kvzip without a model: its scores come with the observation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from build import first_round, second_round
from kvest.policy import Policy
from kvest.propose import KVzip, Mixed, SnapKV, WithCertain

every_round = pytest.mark.parametrize("make", [first_round, second_round])


@every_round
def test_scores_come_with_the_observation(make, generator):
    observation = make(generator)
    score = KVzip()(observation).score
    assert torch.equal(score[observation.valid], observation.prepared[observation.valid])
    assert not score[~observation.valid].any()
    with pytest.raises(ValueError, match=r"cache\.prepare\(input_ids\), or pass Observation\.prepared"):
        KVzip()(replace(observation, prepared=None))


def test_wrappers_ask_for_the_passes_of_what_they_wrap():
    assert KVzip(512).extra_passes == 512
    assert SnapKV().extra_passes == 0
    assert Mixed(KVzip(512)).extra_passes == 512
    assert Mixed(SnapKV()).extra_passes == 0
    assert WithCertain(KVzip(512), SnapKV()).extra_passes == 512
    assert WithCertain(SnapKV(), KVzip(512)).extra_passes == 512


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1, not 0"):
        KVzip(0)
    for propose in ("kvzip", "mixed(kvzip, 0.2)"):
        with pytest.raises(ValueError, match=r"kvzip.* in passes of its own.*every=8.*leave every= out"):
            Policy.parse(f"{propose}/top_k/none@0.5, every=8")

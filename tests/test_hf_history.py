"""A score that adds up over rounds counts every query since the prompt, whenever it was asked."""

from __future__ import annotations

import pytest
import torch

import kvest
from hf_tools import Pieces, tokens, twin


@pytest.mark.parametrize(
    "counts", [(131, *[1] * 14), (67, 67, 67), (131, 9, *[1] * 7)], ids=["decode", "chunks", "turns"]
)
def test_h2o_ranks_by_the_attention_collected_in_all_rounds(tiny_model, generator, counts):
    """The last round keeps, besides sinks and window, the 41 entries with the most attention per query that saw them.

    Attention of all queries comes from the twin, which sees what each piece saw and keeps no history.
    """
    model = tiny_model(layers=2)
    pieces = Pieces(model, kvest.EvictionCache(model, "h2o/top_k/none@61, every=7"))
    for count in counts:
        before = pieces.cache.report()
        pieces.feed(tokens(generator, count))
    after = pieces.cache.report()
    assert after.evictions[0] == before.evictions[0] + 1 >= 3
    attention: dict[tuple[int, int], torch.Tensor] = {}
    twin(model, pieces.ids, pieces.saw, attention)
    seen = sum(counts)
    for layer in range(2):
        for head in range(2):
            collected = sum(attention[layer, 3 * head + g].sum(dim=0) for g in range(3))
            held = torch.cat([before.positions[layer][0][head], torch.arange(seen - counts[-1], seen)])
            protected = (held < 4) | (held >= seen - 16)
            score = (collected / (seen - torch.arange(seen)))[held].masked_fill(protected, torch.inf)
            want = held[score.argsort(descending=True)[:61]].sort().values
            assert torch.equal(after.positions[layer][0][head], want)

"""The flow on a tiny model, as a caller uses it."""

import kvest


def test_keep_everything_is_bit_for_bit(tiny_model):
    import torch

    model = tiny_model()
    ids = torch.randint(3, 101, (1, 90))
    with torch.no_grad():
        want = model(ids).logits
        cache = kvest.EvictionCache(model, "h2o(values=True)+one_threshold/systematic/tempered(0.85)@1.0")
        got = model(ids, past_key_values=cache).logits
    assert torch.equal(got, want)

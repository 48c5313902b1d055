"""Rows are independent: padding is never kept, and a row of a batch is what it is alone."""

from __future__ import annotations

import pytest
import torch

import kvest
from hf_tools import POLICIES, feed, same_entries, singly, tokens

LENGTHS = (211, 83, 151)
"""Real tokens of each row; all are evicted, by different amounts."""


def left_padded(rows):
    """(ids, mask) of rows of different lengths, padding in front."""
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :] = row[0]
        mask[i, width - row.shape[1] :] = 1
    return ids, mask


def alone(model, policy, *pieces):
    """(cache, logits of the last piece) of one row fed without padding."""
    cache = kvest.EvictionCache(model, policy)
    for piece in pieces:
        logits = feed(model, cache, piece)
    return cache, logits


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_of_a_left_padded_batch_is_the_row_alone(tiny_model, generator, policy):
    """Fault 6: no slot is spent on padding, and none of it counts."""
    model = tiny_model(layers=2)
    rows = [tokens(generator, n) for n in LENGTHS]
    ids, mask = left_padded(rows)
    batch = kvest.EvictionCache(model, policy)
    feed(model, batch, ids, mask)
    report = batch.report()
    assert report.seen.tolist() == list(LENGTHS)
    for i, row in enumerate(rows):
        cache, _ = alone(model, policy, row)
        same_entries(report, i, cache.report(), 0)


@pytest.mark.parametrize("policy", [POLICIES[1], *POLICIES[3:5]])
def test_generate_gives_each_row_of_a_padded_batch_the_tokens_it_gets_alone(tiny_model, generator, policy):
    """Fault 6: padding does not change an answer."""
    model = tiny_model(layers=2)
    rows = [tokens(generator, n) for n in LENGTHS]
    ids, mask = left_padded(rows)
    batch = kvest.EvictionCache(model, policy)
    out = model.generate(ids, attention_mask=mask, past_key_values=batch, max_new_tokens=7, do_sample=False)
    for i, row in enumerate(rows):
        cache = kvest.EvictionCache(model, policy)
        own = model.generate(
            row, attention_mask=torch.ones_like(row), past_key_values=cache, max_new_tokens=7, do_sample=False
        )
        assert torch.equal(out[i, ids.shape[1] :], own[0, row.shape[1] :])
        same_entries(batch.report(), i, cache.report(), 0)


@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[3], "h2o(values=True)/systematic/tempered(0.85)@61, every=7"])
@pytest.mark.parametrize("how", [feed, singly])
def test_padding_inside_a_left_padded_question_changes_nothing(tiny_model, generator, policy, how):
    """Then two more tokens, so that an entry written by padding would be seen."""
    model = tiny_model(layers=2)
    rows, questions = [tokens(generator, n) for n in LENGTHS], [tokens(generator, n) for n in (5, 13, 1)]
    more = tokens(generator, 2, rows=3)
    batch = kvest.EvictionCache(model, policy)
    ids, mask = left_padded(rows)
    feed(model, batch, ids, mask)
    question_ids, question_mask = left_padded(questions)
    mask = torch.cat([mask, question_mask], dim=1)
    answer = how(model, batch, question_ids, mask)
    then = singly(model, batch, more, torch.cat([mask, torch.ones_like(more)], dim=1))
    for i, (row, question) in enumerate(zip(rows, questions, strict=True)):
        cache = kvest.EvictionCache(model, policy)
        feed(model, cache, row)
        want = how(model, cache, question)
        torch.testing.assert_close(answer[i, -question.shape[1] :], want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(then[i], singly(model, cache, more[i : i + 1])[0], rtol=1e-5, atol=1e-5)
        same_entries(batch.report(), i, cache.report(), 0)


def test_a_row_may_have_no_token_in_a_later_pass(tiny_model, generator):
    """As when one row of a batch has nothing to say in a turn."""
    model, policy = tiny_model(layers=2), "h2o/systematic/inclusion@61, every=7"
    rows = [tokens(generator, n) for n in (131, 151)]
    batch = kvest.EvictionCache(model, policy)
    ids, mask = left_padded(rows)
    feed(model, batch, ids, mask)
    question = tokens(generator, 17, rows=2)
    mask = torch.cat([mask, torch.ones_like(question)], dim=1)
    mask[0, -17:] = 0
    feed(model, batch, question, mask)
    last = tokens(generator, 1, rows=2)
    mask = torch.cat([mask, torch.ones_like(last)], dim=1)
    logits = feed(model, batch, last, mask)
    silent, silent_logits = alone(model, policy, rows[0], last[:1])
    same_entries(batch.report(), 0, silent.report(), 0)
    torch.testing.assert_close(logits[:1], silent_logits, rtol=1e-5, atol=1e-5)
    spoke, spoke_logits = alone(model, policy, rows[1], question[1:], last[1:])
    same_entries(batch.report(), 1, spoke.report(), 0)
    torch.testing.assert_close(logits[1:], spoke_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_right_padding_changes_nothing(tiny_model, generator, policy):
    """A tokenizer that pads on the right: the prompt's own logits, entries, weights, and the next tokens."""
    model = tiny_model(layers=2)
    rows = [tokens(generator, n) for n in LENGTHS]
    width = max(LENGTHS)
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : row.shape[1]], mask[i, : row.shape[1]] = row[0], 1
    batch = kvest.EvictionCache(model, policy)
    feed(model, batch, ids, mask)
    more = tokens(generator, 3, rows=3)
    logits = feed(model, batch, more, torch.cat([mask, torch.ones_like(more)], dim=1))
    for i, row in enumerate(rows):
        cache, want = alone(model, policy, row, more[i : i + 1])
        torch.testing.assert_close(logits[i], want[0], rtol=1e-5, atol=1e-5)
        same_entries(batch.report(), i, cache.report(), 0)


def test_padding_in_a_prompt_that_is_kept_whole_is_not_in_the_report(tiny_model, generator):
    model = tiny_model(layers=2)
    ids, mask = left_padded([tokens(generator, n) for n in (23, 41)])
    cache = kvest.EvictionCache(model, "h2o/top_k/none@1024")
    feed(model, cache, ids, mask)
    report = cache.report()
    assert report.kept_whole
    assert report.seen.tolist() == [23, 41]
    assert report.kept[:, 0].unique().tolist() == [23]
    assert torch.equal(report.positions[1][0][1], torch.arange(23))


def test_rows_within_budget_stay_whole_while_others_are_evicted(tiny_model, generator):
    model, policy = tiny_model(layers=2), "h2o+one_threshold/systematic/inclusion@97"
    rows = [tokens(generator, n) for n in (89, 191)]
    ids, mask = left_padded(rows)
    batch = kvest.EvictionCache(model, policy)
    feed(model, batch, ids, mask)
    report = batch.report()
    assert report.evictions == [0, 1]
    for layer in range(2):
        for head in range(2):
            assert torch.equal(report.positions[layer][0][head], torch.arange(89))
            assert report.log_weights[layer][0][head].abs().max() == 0
    more = tokens(generator, 5, rows=2)
    logits = feed(model, batch, more, torch.cat([mask, torch.ones_like(more)], dim=1))
    for i, row in enumerate(rows):
        cache, want = alone(model, policy, row, more[i : i + 1])
        torch.testing.assert_close(logits[i], want[0], rtol=1e-5, atol=1e-5)
        same_entries(batch.report(), i, cache.report(), 0)


@pytest.mark.parametrize("policy", ["h2o/systematic/inclusion@20, every=7", "snapkv/top_k/none@20, every=7"])
def test_a_turn_may_be_padded_to_more_columns_than_are_held(tiny_model, generator, policy):
    """A long line of one row pads the others far beyond a small budget; those that speak are evicted all the same."""
    model = tiny_model(layers=2)
    prompt, more = tokens(generator, 61, rows=2), tokens(generator, 53, rows=2)
    mask = torch.ones(2, 114, dtype=torch.long)
    mask[0, 61:], mask[1, 61:105] = 0, 0
    batch = kvest.EvictionCache(model, policy)
    feed(model, batch, prompt, mask[:, :61])
    logits = feed(model, batch, more, mask)
    silent, _ = alone(model, policy, prompt[:1])
    spoke, want = alone(model, policy, prompt[1:], more[1:, 44:])
    assert batch.report().evictions == [1, 2]
    same_entries(batch.report(), 0, silent.report(), 0)
    same_entries(batch.report(), 1, spoke.report(), 0)
    torch.testing.assert_close(logits[1, 44:], want[0], rtol=1e-5, atol=1e-5)

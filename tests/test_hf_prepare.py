"""`cache.prepare`: the model repeats the document before it is evicted, and nothing of that stays in the cache."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import kvest
from families import FAMILIES, RECURRENT, named
from hf_tools import POLICIES, feed, hybrid, same_entries, tokens, twin
from kvest.budget import Fraction
from kvest.correct import NoCorrection
from kvest.eval.prefill import Prefill
from kvest.hf.compat import CACHE_ARGUMENT
from kvest.hf.layer import EvictionLayer
from kvest.hf.request import Request
from kvest.named import NAMED
from kvest.policy import Policy
from kvest.propose import KVzip
from kvest.sample import TopK
from kvest.types import Observation, Proposal
from tiny_tokenizer import tiny_tokenizer

KVZIP = f"{NAMED['kvzip']}@0.4"
TEXT = "Once upon a time there was a number, 7306, and nobody knew it. The end of it all came soon, in 1962."


@dataclass(frozen=True)
class Recorder(KVzip):
    """kvzip that notes what it was shown, and wants all queries as well."""

    seen: ClassVar[list[Observation]] = []

    @property
    def queries(self) -> int | None:
        return None

    def __call__(self, observation: Observation) -> Proposal:
        self.seen.append(observation)
        return super().__call__(observation)


@pytest.fixture
def seen() -> list[Observation]:
    Recorder.seen.clear()
    return Recorder.seen


def recorder(chunk: int = 2048, sinks: int = 4) -> Policy:
    return Policy(Recorder(chunk), TopK(), NoCorrection(), Fraction(0.4), sinks=sinks)


def document(tokenizer: Any, text: str = TEXT) -> Tensor:
    """The beginning of a chat with the text in it, or the text behind a token that begins every text."""
    before = "<s>Be good. Ask: " if tokenizer.chat_template else "<s>"
    return tokenizer(before + text, add_special_tokens=False, return_tensors="pt").input_ids


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    return ids, torch.cat([torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows])


@torch.no_grad()
def last_logits(model: PreTrainedModel, cache: object, ids: Tensor) -> Tensor:
    """Of a plain pass."""
    return model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits[:, -1]


# -- the twin: float64, no cache, the whole text and its repetition in one pass, maxima by loops


def repetition_twin(model: PreTrainedModel, ids: Tensor, tokenizer: Any, chunk: int, sinks: int = 4) -> list[Tensor]:
    """Scores `[h, t]` of every layer for one row."""
    other = copy.deepcopy(model).double()
    other.set_attn_implementation("eager")

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    text = ids[0].tolist()
    before, after = ("<s>Be good. Ask: ", ". Say: ") if tokenizer.chat_template else ("<s>", "\n")
    prefix = encode(before)
    first = 0
    while first < min(len(text), len(prefix)) and text[first] == prefix[first]:
        first += 1
    h, layers = model.config.num_key_value_heads, model.config.num_hidden_layers
    scores = [torch.ones(h, len(text), dtype=torch.float64) for _ in range(layers)]
    for start in range(first, len(text), chunk):
        part = text[start : start + chunk]
        asked = encode("\n\nRepeat the previous context exactly.")
        if start > first:
            asked = encode("\n\nRepeat the part of the previous context exactly, starting with")
            asked += text[first:start][-8:]
        whole = torch.tensor([text + asked + encode(after) + part])
        with torch.no_grad():
            attentions = other(whole, output_attentions=True, use_cache=False).attentions
        always = [i for i in range(max(first, sinks)) if i < start]
        for layer, probabilities in enumerate(attentions):
            repeated(scores[layer], probabilities[0], always, list(range(start, start + len(part))), len(text))
    return scores


def repeated(score: Tensor, probabilities: Tensor, always: list[int], part: list[int], length: int) -> None:
    """Maxima over query heads and the queries from `length` on, of a softmax over some entries only."""
    heads, total, _ = probabilities.shape
    groups = heads // score.shape[0]
    for h in range(score.shape[0]):
        best = dict.fromkeys(part, 0.0)
        for head in range(h * groups, (h + 1) * groups):
            for j in range(length, total):
                p = probabilities[head, j].tolist()
                over = sum(p[i] for i in [*always, *part, *range(length, j + 1)])
                best = {i: max(best[i], p[i] / over) for i in part}
        for i in part:
            score[h, i] = best[i]


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize(("chunk", "sinks"), [(2048, 4), (37, 4), (37, 0), (3, 5)])
def test_scores_are_the_twins(tiny_model, seen, template, chunk, sinks):
    """One chunk, several, and chunks shorter than the sinks; behind a template's beginning, and without one."""
    model = tiny_model()
    tokenizer = tiny_tokenizer() if template else tiny_tokenizer(None)
    ids = document(tokenizer, TEXT[:47] if chunk == 3 else TEXT)
    cache = kvest.EvictionCache(model, recorder(chunk, sinks))
    cache.prepare(ids, tokenizer=tokenizer, progress=False)
    for observation, want in zip(seen, repetition_twin(model, ids, tokenizer, chunk, sinks), strict=True):
        torch.testing.assert_close(observation.prepared[0].double(), want, rtol=1e-4, atol=1e-6)
    if template:
        assert (want[:, :15] == 1).all()
        assert (want[:, 15:] < 1).all()


def test_bounded_layers_are_unharmed_and_the_others_are_the_twins(seen):
    """gemma3: the document is longer than the window."""
    model, tokenizer = hybrid(), tiny_tokenizer()
    ids = document(tokenizer)
    cache = kvest.EvictionCache(model, recorder(37))
    cache.prepare(ids, tokenizer=tokenizer, progress=False)
    scores = repetition_twin(model, ids, tokenizer, 37)
    assert [o.layers for o in seen] == [2, 2]
    for observation, layer in zip(seen, (2, 5), strict=True):
        torch.testing.assert_close(observation.prepared[0].double(), scores[layer], rtol=1e-4, atol=1e-6)
    bounded_as_before(model, cache, ids)


@pytest.mark.parametrize("name", named(*RECURRENT))
def test_recurrent_states_are_unharmed(name):
    model, tokenizer = FAMILIES[name](), tiny_tokenizer()
    ids = document(tokenizer)
    cache = kvest.EvictionCache(model, KVZIP)
    cache.prepare(ids, tokenizer=tokenizer, progress=False)
    assert cache.report().evictions == [1]
    bounded_as_before(model, cache, ids)
    several = kvest.EvictionCache(model, KVZIP)
    with pytest.raises(ValueError, match="cannot repeat or select rows"):
        several.prepare(ids.repeat(2, 1), tokenizer=tokenizer, progress=False)
    assert several.get_seq_length() == 0


def bounded_as_before(model: PreTrainedModel, cache: kvest.EvictionCache, ids: Tensor) -> None:
    """Layers that are not evicted hold what a plain pass over the document leaves."""
    stock = DynamicCache(config=model.config)
    feed(model, stock, ids)
    compared = 0
    for layer, plain in zip(cache.layers, stock.layers, strict=True):
        if not isinstance(layer, EvictionLayer):
            for name, x in vars(plain).items():
                for mine, want in zip(leaves(getattr(layer, name)), leaves(x), strict=True):
                    assert torch.equal(mine, want) if isinstance(want, Tensor) else mine == want, name
                    compared += isinstance(want, Tensor)
    assert compared > 0


def leaves(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return [leaf for value in x.values() for leaf in leaves(value)]
    return [leaf for value in x for leaf in leaves(value)] if isinstance(x, list | tuple) else [x]


@pytest.mark.parametrize("make", ["llama", "gemma3"])
@pytest.mark.parametrize("chunk", [2048, 41])
def test_a_row_of_a_left_padded_batch_is_the_row_alone(tiny_model, generator, make, chunk):
    """Rows repeat their own text, of different lengths, one of them within its budget; then all decode on."""
    model = tiny_model() if make == "llama" else hybrid()
    tokenizer = tiny_tokenizer()
    policy = f"kvzip({chunk})+one_threshold(raw=True)/top_k/none@60"
    rows = [document(tokenizer, text) for text in (TEXT, TEXT[31:], TEXT[:9])]
    ids, mask = left_padded(rows)
    batch = kvest.EvictionCache(model, policy)
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    logits = batch.prepare(ids, mask, tokenizer=tokenizer, progress=False)
    hook.remove()
    assert len(calls) == 1 + (2 if chunk == 2048 else 5)  # the row that keeps everything is not repeated
    more = tokens(generator, 7, rows=3)
    after = feed(model, batch, more, torch.cat([mask, torch.ones_like(more)], dim=1))
    assert batch.report().evictions == [1, 1, 0]
    for i, row in enumerate(rows):
        alone = kvest.EvictionCache(model, policy)
        want = alone.prepare(row, tokenizer=tokenizer, progress=False)
        torch.testing.assert_close(logits[i], want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after[i], feed(model, alone, more[i : i + 1])[0], rtol=2e-5, atol=2e-5)
        same_entries(batch.report(), i, alone.report(), 0)


BESIDE = "with_certain(kvzip, by=h2o, share=0.2)/top_k/none@1.0"  # h2o wants queries until nothing is due
UNREPEATED = (f"{NAMED['kvzip']}@1.0", "kvzip/top_k/none@400", BESIDE, *POLICIES, "h2o/top_k/none@24, every=4")


@pytest.mark.parametrize("policy", UNREPEATED)
def test_without_need_for_more_passes_it_is_the_plain_prefill(tiny_model, generator, policy):
    """Bit for bit: the logits, what is held, and what is decoded next. The model reads the document once."""
    model, ids, after = tiny_model(), tokens(generator, 61, rows=2), tokens(generator, 5, rows=2)
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    prepared = kvest.EvictionCache(model, policy)
    logits = prepared.prepare(ids, tokenizer=tiny_tokenizer())
    hook.remove()
    assert calls == [1]
    plain = DynamicCache() if "kvzip" in policy else kvest.EvictionCache(model, policy)
    assert torch.equal(logits, last_logits(model, plain, ids))
    assert torch.equal(feed(model, prepared, after), feed(model, plain, after))
    if "kvzip" not in policy:
        for row in range(2):
            same_entries(prepared.report(), row, plain.report(), row, tolerance=0.0)
    assert not any(layer.queries for layer in prepared.layers) or "every" in policy


def test_padding_may_stand_behind_a_row_too(tiny_model):
    """Its entries move to where they belong, and the scores with them."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    rows = [document(tokenizer), document(tokenizer, TEXT[31:])]
    missing = rows[0].shape[1] - rows[1].shape[1]
    ids = torch.cat([rows[0], torch.nn.functional.pad(rows[1], (0, missing))])
    mask = torch.ones_like(ids)
    mask[1, -missing:] = 0
    batch = kvest.EvictionCache(model, KVZIP)
    batch.prepare(ids, mask, tokenizer=tokenizer, progress=False)
    for i, row in enumerate(rows):
        alone = kvest.EvictionCache(model, KVZIP)
        alone.prepare(row, tokenizer=tokenizer, progress=False)
        same_entries(batch.report(), i, alone.report(), 0)


def test_kept_entries_are_those_of_the_plain_pass(tiny_model):
    """Bit for bit: repeating changes which entries stay, and none of their numbers."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = document(tokenizer)
    cache, stock = kvest.EvictionCache(model, KVZIP), DynamicCache()
    logits = cache.prepare(ids, tokenizer=tokenizer, progress=False)
    assert torch.equal(logits, last_logits(model, stock, ids))
    report = cache.report()
    assert report.seen.tolist() == [ids.shape[1]]
    assert report.kept.sum() == int(0.4 * ids.shape[1]) * 6
    assert report.kept.min() < report.kept.max()
    for layer, plain, positions in zip(cache.layers, stock.layers, report.positions, strict=True):
        for head, where in enumerate(positions[0]):
            assert torch.equal(layer.store.head(layer.store.keys, 0, head), plain.keys[0, head, where])
            assert torch.equal(layer.store.head(layer.store.values, 0, head), plain.values[0, head, where])


def test_the_best_scores_of_the_whole_model_stay(tiny_model, seen):
    """Besides sinks and window: no entry that went scored more than one that stayed, whatever its layer and head."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = document(tokenizer)
    cache = kvest.EvictionCache(model, Policy.parse(KVZIP))
    cache.prepare(ids, tokenizer=tokenizer, progress=False)
    kvest.EvictionCache(model, recorder()).prepare(ids, tokenizer=tokenizer, progress=False)
    stayed, went = [], []
    for positions, observation in zip(cache.report().positions, seen, strict=True):
        for head, where in enumerate(positions[0]):
            for i, x in enumerate(observation.prepared[0, head].tolist()):
                if 4 <= i < ids.shape[1] - 16:
                    (stayed if i in where.tolist() else went).append(x)
    assert min(stayed) >= max(went)


def test_decoding_goes_on_as_over_what_is_held(tiny_model, generator):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = document(tokenizer)
    cache = kvest.EvictionCache(model, KVZIP)
    first = cache.prepare(ids, tokenizer=tokenizer, progress=False)
    held = cache.report()
    question = tokens(generator, 11)
    got = torch.cat([first[:, None], feed(model, cache, question)], dim=1)
    want = twin(model, [ids, question], [None, held])[:, ids.shape[1] - 1 :]
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5 * float(want.abs().max()))
    asked = torch.cat([ids, question], dim=1)
    again = kvest.EvictionCache(model, KVZIP)
    again.prepare(ids, tokenizer=tokenizer, progress=False)
    greedy = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(asked)}
    out = model.generate(asked, **greedy, **{CACHE_ARGUMENT: again})
    assert out[0, asked.shape[1]] == got[0, -1].argmax()


def test_other_proposals_beside_it_see_the_documents_queries(tiny_model, seen):
    """And not those of the repetition."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids, mask = left_padded([document(tokenizer), document(tokenizer, TEXT[:50])])
    cache = kvest.EvictionCache(model, recorder(37))
    cache.prepare(ids, mask, tokenizer=tokenizer, progress=False)
    mine = list(seen)
    seen.clear()

    class Plain(Recorder):
        extra_passes = 0

        def __call__(self, observation: Observation) -> Proposal:
            self.seen.append(observation)
            return Proposal(observation.valid.float(), torch.zeros_like(observation.valid))

    plain = kvest.EvictionCache(model, Policy(Plain(), TopK(), NoCorrection(), Fraction(0.4)))
    feed(model, plain, ids, mask)
    for a, b in zip(mine, seen, strict=True):
        for name in ("queries", "keys", "values", "positions", "lengths", "query_lengths", "seen", "budget", "due"):
            x, y = getattr(a, name), getattr(b, name)
            real = b.query_valid[:, None, None, :, None] if name == "queries" else torch.ones_like(y).bool()
            assert torch.equal(x * real, y * real), name
        assert a.prepared[1, :, : -int(a.lengths[1, 0])].numel() > 0


def test_a_layer_gives_back_its_part_of_a_pass_at_once(tiny_model):
    """While the last layer computes, the others hold the document and nothing else."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = document(tokenizer)
    cache = kvest.EvictionCache(model, KVZIP)
    held = []
    model.model.layers[-1].register_forward_pre_hook(
        lambda *_: held.append([layer.keys.untyped_storage().nbytes() for layer in cache.layers[:-1]])
    )
    cache.prepare(ids, tokenizer=tokenizer, progress=False)
    document_bytes = ids.shape[1] * 2 * 8 * 4
    assert held == [[document_bytes] * 2] * 2


def test_one_prefill_serves_many_policies(tiny_model):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids, mask = left_padded([document(tokenizer), document(tokenizer, TEXT[:50])])
    prefill = Prefill(model, ids, mask, tokenizer)
    for policy in (KVZIP, "with_certain(kvzip(37), by=snapkv, share=0.2)+one_threshold/systematic/inclusion@0.5"):
        shared = prefill.evict(Policy.parse(policy), seed=3)
        alone = kvest.EvictionCache(model, policy, seed=3)
        alone.prepare(ids, mask, tokenizer=tokenizer, progress=False)
        for row in range(2):
            same_entries(shared.report(), row, alone.report(), row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tiny_model, dtype):
    model, tokenizer = tiny_model().to(dtype), tiny_tokenizer()
    cache = kvest.EvictionCache(model, KVZIP)
    logits = cache.prepare(document(tokenizer), tokenizer=tokenizer, progress=False)
    assert logits.dtype == dtype
    assert cache.report().evictions == [1]


def test_the_tokenizer_is_found_where_the_model_was_loaded_from(tiny_model, tmp_path):
    tokenizer = tiny_tokenizer()
    tiny_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    found, given = kvest.EvictionCache(model, KVZIP), kvest.EvictionCache(model, KVZIP)
    found.prepare(document(tokenizer), progress=False)
    given.prepare(document(tokenizer), tokenizer=tokenizer, progress=False)
    same_entries(found.report(), 0, given.report(), 0, tolerance=0.0)


def test_a_progress_bar_shows_the_passes(tiny_model, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    model, tokenizer = tiny_model(), tiny_tokenizer()
    for progress in (False, True):
        cache = kvest.EvictionCache(model, "kvzip(37)/top_k/none@0.5")
        cache.prepare(document(tokenizer), tokenizer=tokenizer, progress=progress)
        out, err = capsys.readouterr()
        assert out == ""
        assert ("repeating" in err and "3/3" in err) == progress


# -- what is refused


@pytest.mark.parametrize("make", ["llama", "gemma3"])
def test_a_plain_pass_is_refused_before_anything_is_lost(tiny_model, make):
    """It names the way out, and the cache can go it."""
    model, tokenizer = tiny_model() if make == "llama" else hybrid(), tiny_tokenizer()
    ids = document(tokenizer)
    cache, fresh = kvest.EvictionCache(model, KVZIP), kvest.EvictionCache(model, KVZIP)
    with pytest.raises(ValueError, match=r"kvzip.*cache\.prepare\(input_ids, attention_mask\) first"):
        model.generate(ids, max_new_tokens=3, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 0
    cache.prepare(ids, tokenizer=tokenizer, progress=False)
    fresh.prepare(ids, tokenizer=tokenizer, progress=False)
    same_entries(cache.report(), 0, fresh.report(), 0, tolerance=0.0)


def test_a_missing_tokenizer_is_named(tiny_model, generator, tmp_path):
    model = tiny_model()
    model.config._name_or_path = str(tmp_path)
    cache = kvest.EvictionCache(model, KVZIP)
    with pytest.raises(ValueError, match=rf"found no tokenizer at '{tmp_path}'.*pass tokenizer="):
        cache.prepare(tokens(generator, 61))
    kvest.EvictionCache(model, POLICIES[0]).prepare(tokens(generator, 61))


@pytest.mark.parametrize("policy", [KVZIP, POLICIES[0]])
def test_a_cache_that_has_read_is_refused(tiny_model, policy):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = document(tokenizer)
    cache = kvest.EvictionCache(model, policy)
    cache.prepare(ids, tokenizer=tokenizer, progress=False)
    with pytest.raises(ValueError, match=rf"has seen {ids.shape[1]} tokens: call cache\.reset\(\)"):
        cache.prepare(ids, tokenizer=tokenizer, progress=False)
    kept = cache.report()
    cache.reset()
    cache.prepare(ids, tokenizer=tokenizer, progress=False)
    same_entries(cache.report(), 0, kept, 0, tolerance=0.0)


@pytest.mark.parametrize("make", ["llama", "gemma3"])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_an_interrupt_leaves_an_empty_cache(tiny_model, make, when):
    """In the document's own pass, and in those that repeat it."""
    model, tokenizer = tiny_model() if make == "llama" else hybrid(), tiny_tokenizer()
    ids = document(tokenizer)
    cache, fresh = (kvest.EvictionCache(model, "kvzip(67)/top_k/none@0.5") for _ in range(2))
    calls = []

    def interrupt(*_: object) -> None:
        calls.append(1)
        if len(calls) == when + 1:
            raise KeyboardInterrupt

    hook = model.model.layers[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.prepare(ids, tokenizer=tokenizer, progress=False)
    hook.remove()
    assert cache.get_seq_length() == 0
    assert cache.report().kept_bytes == fresh.report().kept_bytes
    with pytest.raises(ValueError, match=r"cache\.prepare"):
        feed(model, cache, ids)
    cache.prepare(ids, tokenizer=tokenizer, progress=False)
    fresh.prepare(ids, tokenizer=tokenizer, progress=False)
    same_entries(cache.report(), 0, fresh.report(), 0, tolerance=0.0)


def test_a_repetition_beyond_the_context_warns(tiny_model):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = document(tokenizer)
    model.config.max_position_embeddings = 2 * ids.shape[1]
    with pytest.warns(UserWarning, match=r"takes \d+ positions, beyond the model's context of \d+.*kvzip\(512\)"):
        kvest.EvictionCache(model, KVZIP).prepare(ids, tokenizer=tokenizer, progress=False)
    kvest.EvictionCache(model, "kvzip(16)/top_k/none@0.5").prepare(ids, tokenizer=tokenizer, progress=False)


def test_a_repetition_as_long_as_the_document_is_no_chunked_prefill(tiny_model, recwarn):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    asked, ids = Request.of(tokenizer), document(tokenizer)
    chunk = ids.shape[1] - len(asked.first) - len(asked.suffix)
    assert len(asked.passes(ids[0].tolist(), chunk)[0][2]) == ids.shape[1]
    kvest.EvictionCache(model, f"kvzip({chunk})/top_k/none@0.5").prepare(ids, tokenizer=tokenizer, progress=False)
    assert not recwarn

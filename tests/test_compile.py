"""torch.compile: a compiled model evicts and answers as it does uncompiled, and no token makes it compile again.

One script runs in an interpreter of its own, since the shape checks of the test run would be compiled too.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
import kvest
torch.set_num_threads(1)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=101, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, bos_token_id=1, eos_token_id=None,
)).eval()
for parameter in model.parameters():
    parameter.data.mul_(4.0) if parameter.ndim == 2 else None
generator = torch.Generator().manual_seed(1)
ids = torch.randint(3, 101, (1, 101), generator=generator)
POLICY = "h2o(values=True)+one_threshold/systematic/tempered(0.85)@61, every=7"

def compiled():
    return counters["frames"]["total"]

def steps(call, cache):
    out, frames = [], []
    with torch.no_grad():
        for piece in (ids[:, :71], *ids[:, 71:].split(1, dim=1)):
            out.append(call(piece, past_key_values=cache).logits)
            frames.append(compiled())
    return torch.cat(out, dim=1), frames

def answer():
    cache, mask = kvest.EvictionCache(model, POLICY), torch.ones(2, 71, dtype=torch.long)
    mask[1, :5] = 0
    out = model.generate(ids[:, :71].repeat(2, 1), attention_mask=mask, past_key_values=cache, do_sample=False,
                         max_new_tokens=25)
    return out, cache.report().evictions

found = {}
plain, cache = kvest.EvictionCache(model, POLICY), kvest.EvictionCache(model, POLICY)
want, uncompiled = steps(model, plain)
answers = [answer()]

got, frames = steps(torch.compile(model, backend="eager"), cache)
found["equal"] = torch.equal(got, want)
found["evictions"] = [plain.report().evictions, cache.report().evictions]
found["frames"] = [uncompiled[-1], *frames]
found["breaks"] = [why for why in counters["graph_break"] if "disable" in why]

torch._dynamo.reset()
counters.clear()
whole = torch.compile(model, backend="eager", fullgraph=True)
found["stock"] = []
for make in (lambda: DynamicCache(config=model.config), lambda: StaticCache(config=model.config, max_cache_len=80)):
    with torch.no_grad():
        one, other = (call(ids[:, :71], past_key_values=make()).logits for call in (model, whole))
    found["stock"].append(torch.equal(one, other) and counters["stats"]["unique_graphs"] > 0)
try:
    steps(whole, kvest.EvictionCache(model, POLICY))
except Exception as error:
    found["refused"] = str(error)

torch._dynamo.reset()
counters.clear()
model.forward = torch.compile(model.forward, backend="eager")
answers.append(answer())
found["answers"] = [torch.equal(answers[0][0], answers[1][0]), answers[0][1] == answers[1][1], compiled() > 0]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    """What the script printed."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_compiled_decode_equals_an_uncompiled_one(found):
    """30 tokens with five evictions among them, bit for bit."""
    assert found["equal"]
    assert found["evictions"] == [[5], [5]]


def test_nothing_is_compiled_again_after_the_second_token(found):
    """The prompt, the first token, and one more for lengths that grow."""
    uncompiled, prompt, *decode = found["frames"]
    assert uncompiled == 0
    assert 0 < prompt <= decode[1] == decode[-1]
    assert found["breaks"]


def test_generate_with_a_compiled_forward_gives_the_tokens_of_the_uncompiled_one(found):
    """`model.forward = torch.compile(model.forward)`, and a padded batch."""
    assert found["answers"] == [True, True, True]


def test_one_graph_is_refused_for_an_eviction_cache_with_a_way_out(found):
    assert "EvictionCache holds grows with every token" in found["refused"]
    assert "leave out fullgraph=True" in found["refused"]


def test_an_attached_model_still_compiles_into_one_graph_with_a_stock_cache(found):
    assert found["stock"] == [True, True]

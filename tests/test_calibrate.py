"""Measuring heads: gradients against loops, damage against attention masked by hand, tables in files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hf_tools
import kvest
import reference_sampling
from hf_tools import feed, hybrid, tokens
from kvest.eval.calibrate import AHEAD, KEEPS, POLICY, calibrate, damage, gradient, output_modules, passes
from kvest.eval.prefill import Prefill
from kvest.eval.scored import Scored
from kvest.hf import calibration
from kvest.hf.calibration import CalibrationError, default_path, find, load, save
from kvest.hf.embedded import load as load_embedded


@pytest.fixture(autouse=True)
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache directory that is empty."""
    monkeypatch.setenv("KVEST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration"


def by_nudges(model, ids: Tensor, layer: int, heads: int, groups: int) -> list[float]:
    """mean_g mean_j norm(dL / do_jg) norm(o_jg) of each KV head, by loops; the derivative is that with respect to a 0
    that is added to what enters the layer's output projection."""
    seen: list[Tensor] = []
    nudge = torch.zeros(1, ids.shape[1], output_modules(model)[layer].in_features, requires_grad=True)

    def add(_, inputs):
        seen.append(inputs[0].detach()[0])
        return (inputs[0] + nudge,)

    hook = output_modules(model)[layer].register_forward_pre_hook(add)
    logits = model(ids, use_cache=False).logits[0].double()
    hook.remove()
    loss = sum(logits[j].exp().sum().log() - logits[j, ids[0, j + 1]] for j in range(ids.shape[1] - 1))
    loss.backward()
    width, out = nudge.shape[2] // (heads * groups), []
    for head in range(heads):
        total = 0.0
        for g in range(groups):
            at = (head * groups + g) * width
            for j in range(ids.shape[1]):
                slope, output = (x[j, at : at + width].tolist() for x in (nudge.grad[0], seen[0]))
                total += math.sqrt(sum(x * x for x in slope)) * math.sqrt(sum(x * x for x in output))
        out.append(total / groups / ids.shape[1])
    model.zero_grad()
    return out


@pytest.mark.parametrize("layer", [0, 1])
def test_a_head_is_felt_by_gradient_times_output(layer, tiny_model, generator):
    """A later layer's attention sees the earlier one's output: the gradient goes through it."""
    model = tiny_model(heads=4, kv_heads=2, layers=2)
    ids = tokens(generator, 13)
    want = by_nudges(model, ids, layer, heads=2, groups=2)
    got = gradient(model, ids)
    assert got.shape == (2, 2)
    torch.testing.assert_close(got[layer], torch.tensor(want), rtol=1e-4, atol=1e-7)


def test_measuring_leaves_the_model_as_it_was(tiny_model, generator):
    model = tiny_model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    flags = [parameter.requires_grad_(i % 2 == 0).requires_grad for i, parameter in enumerate(model.parameters())]
    with torch.no_grad():
        gradient(model, tokens(generator, 17))
        assert not torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_the_gradient_needs_no_parameter_that_asks_for_one(tiny_model, generator):
    model, ids = tiny_model(), tokens(generator, 17)
    want = gradient(model, ids)
    torch.testing.assert_close(gradient(model.requires_grad_(False), ids), want)


@torch.no_grad()
def test_damage_is_the_divergence_of_a_cache_in_which_one_head_is_evicted(tiny_model, generator):
    """The same by keeping the head's entries by hand, in a stock cache with masked attention, in float64."""
    model = tiny_model(heads=6, kv_heads=2, layers=3)
    ids, ahead, keep = tokens(generator, 71), 11, 0.4
    got, variance = damage(model, ids, ahead, [keep, 1.0], seed=3)
    assert got.shape == variance.shape == (3, 2, 2)
    assert not got[..., 1].any()
    assert not variance[..., 1].any()
    read = Scored(Prefill(model, ids[:, :-ahead]), POLICY)
    logits = model(ids).logits[0, -ahead:].double().log_softmax(-1)
    for layer, head in [(0, 1), (1, 0), (2, 1)]:
        with read.evicted({layer: read.one_head(layer, head, keep)}, seed=3) as cache:
            report = cache.report()
            assert report.kept[layer, 0, head] == int(0.4 * 60)
            others = [(i, h) for i in range(3) for h in range(2) if (i, h) != (layer, head)]
            assert all(report.kept[i, 0, h] == 60 for i, h in others)
            held = report.positions[layer][0][head].tolist(), report.log_weights[layer][0][head].tolist()
        evicted = by_mask(model, ids, ahead, layer, head, held).double().log_softmax(-1)
        want = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(logits, evicted, strict=True)) / ahead
        assert want > 1e-6
        assert float(got[layer, head, 0]) == pytest.approx(want, rel=2e-2, abs=1e-7)
        assert float(variance[layer, head, 0]) == pytest.approx(spread(read, layer, head, 24), rel=1e-5)


def spread(read: Scored, layer: int, head: int, count: int) -> float:
    """sum x^2 (1 / pi - 1) over what is neither a sink nor recent, pi = min(1, c x) by bisection."""
    score = read.proposals[layer].score[0, head].double().tolist()
    free = score[POLICY.sinks : len(score) - POLICY.window]
    x = [each / sum(free) for each in free]
    pi = reference_sampling.inclusion(x, count - POLICY.sinks - POLICY.window)
    return sum(a * a * (1 / p - 1) for a, p in zip(x, pi, strict=True))


def by_mask(model, ids: Tensor, ahead: int, layer: int, head: int, held: tuple[list[int], list[float]]) -> Tensor:
    """Logits of the last tokens when they see, in one head, only what is held: a bias on that head's attention."""
    from transformers import AttentionInterface

    n = ids.shape[1]
    bias = torch.zeros(1, 2, n, n).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    bias[0, head, n - ahead :, : n - ahead] = -torch.inf
    for position, weight in zip(*held, strict=True):
        bias[0, head, n - ahead :, position] = weight
    whole = torch.zeros(1, 1, n, n).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)

    def attend(module, query, key, value, mask, scaling, **_):
        groups = query.shape[1] // key.shape[1]
        mine = bias.repeat_interleave(groups, 1) if module.layer_idx == layer else whole
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return ((query @ key.mT * scaling + mine).softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("by_mask", attend)
    before = model.config._attn_implementation
    model.config._attn_implementation = "by_mask"
    try:
        return model(ids, use_cache=False).logits[0, -ahead:]
    finally:
        model.config._attn_implementation = before


@torch.no_grad()
def test_a_prompt_that_was_scored_once_gives_the_cache_that_the_policy_gives(tiny_model, generator):
    model, ids = tiny_model(), tokens(generator, 83)
    policy = kvest.Policy.parse(hf_tools.POLICIES[1])
    scored = Scored(Prefill(model, ids), policy)
    counts = policy.allocate(scored.proposals, scored.observations, policy.design)
    want = kvest.EvictionCache(model, policy, seed=5)
    feed(model, want, ids)
    for _ in range(2):  # what was decoded in between is forgotten
        with scored.evicted(dict(enumerate(counts)), seed=5) as cache:
            hf_tools.same_entries(cache.report(), 0, want.report(), 0)
            feed(model, cache, ids[:, :7])
    with scored.evicted({}) as cache:
        assert (cache.report().kept == 83).all()


# -- tables


def random_tables(model, own_tables: Path, generator: torch.Generator, method: str = "damage") -> Tensor:
    """Texts that nobody has written are measured; the table is where kvest looks for it."""
    texts = {f"text {i}": tokens(generator, 250 + AHEAD) for i in range(2)}
    table = calibrate(model, texts, method, tokens=240, seed=1)
    own_tables.mkdir(parents=True, exist_ok=True)
    save(table, default_path(model, method))
    return table.importance


@pytest.mark.parametrize("method", ["gradient", "damage"])
def test_a_table_says_what_it_was_measured_on_and_reads_back(method, tiny_model, generator, tmp_path):
    model = tiny_model(layers=2)
    texts = {f"text {i}": tokens(generator, 250 + AHEAD) for i in range(2)}
    heard: list[int] = []
    table = calibrate(model, texts, method, tokens=240, seed=1, on_pass=lambda: heard.append(1), name="tiny")
    assert len(heard) == passes(model, method, 2) == (2 if method == "gradient" else 2 * 2 * 2 * len(KEEPS))
    save(table, tmp_path / "t.safetensors")
    again = load(tmp_path / "t.safetensors")
    assert again.about == table.about
    assert (again.about.method, again.about.model, again.about.seed) == (method, "tiny", 1)
    lengths = [length for _, _, length in again.about.texts]
    assert lengths == [240 + (AHEAD if method == "damage" else 0)] * 2
    assert torch.equal(again.importance, table.importance)
    assert again.importance.shape == (2, 2)
    if method == "gradient":
        each = torch.stack([gradient(model, ids[:, :240]) for ids in texts.values()])
        torch.testing.assert_close(again.importance, each.mean(0))
        assert again.damage is None
        return
    both = [damage(model, ids[:, : 240 + AHEAD], AHEAD, KEEPS, seed=1 + i) for i, ids in enumerate(texts.values())]
    curves, variances = ((x + y) / 2 for x, y in zip(*both, strict=True))
    assert torch.equal(again.damage, curves)
    for layer in range(2):
        for head in range(2):
            pairs = list(zip(curves[layer, head].tolist(), variances[layer, head].tolist(), strict=True))
            want = math.exp(sum(math.log(d / v) for d, v in pairs) / len(KEEPS))
            assert float(again.importance[layer, head]) == pytest.approx(want, rel=1e-5)


def test_a_policy_that_needs_a_table_gets_that_of_its_model(tiny_model, generator, own_tables):
    """Alone or by a shared prefill; the budget is the same as without, and goes to other heads."""
    model, ids = tiny_model(), tokens(generator, 97)
    importance = random_tables(model, own_tables, generator, "gradient")
    policy = "h2o(values=True)+one_threshold(importance=calibrated)/systematic/tempered(0.85)@0.3"
    cache = kvest.EvictionCache(model, policy)
    feed(model, cache, ids)
    torch.testing.assert_close(torch.stack(cache.session.importance), importance)
    assert torch.equal(Prefill(model, ids).evict(cache.policy).report().kept, cache.report().kept)
    plain = kvest.EvictionCache(model, policy.replace("(importance=calibrated)", ""))
    feed(model, plain, ids)
    assert cache.report().kept.sum() == plain.report().kept.sum()
    assert not torch.equal(cache.report().kept, plain.report().kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_table_is_found_in_any_dtype_and_not_for_other_weights(dtype, tiny_model, generator, own_tables):
    random_tables(tiny_model(layers=1), own_tables, generator, "gradient")
    assert find(tiny_model(layers=1).to(dtype), "gradient").about.method == "gradient"
    for other, method in ((tiny_model(layers=1, seed=1), "gradient"), (tiny_model(layers=1), "damage")):
        with pytest.raises(CalibrationError, match=f"LlamaForCausalLM has no table.*kvest calibrate MODEL.*{method}"):
            find(other, method)


def test_a_cache_without_its_table_is_refused_with_the_command(tiny_model):
    with pytest.raises(CalibrationError, match=r"kvest calibrate MODEL --method damage"):
        kvest.EvictionCache(tiny_model(), "h2o+one_threshold(importance=damage)/systematic/inclusion@0.3")


def test_only_layers_that_are_evicted_are_measured(generator, own_tables):
    model = hybrid()
    importance = random_tables(model, own_tables, generator)
    assert importance.shape == (2, 2)
    cache = kvest.EvictionCache(model, "h2o+one_threshold(importance=damage)/systematic/inclusion@0.3")
    feed(model, cache, tokens(generator, 97))
    assert cache.report().kept[[2, 5]].sum() == 4 * 29


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda data: data[: len(data) // 2], "no safetensors file"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum does not match"),
        (lambda data: data.replace(b"kvest-calibration", b"kvest-cullabration"[:17]), "of another version"),
    ],
)
def test_a_file_that_is_no_table_is_refused(spoil, error, tiny_model, generator, own_tables):
    """And a lookup goes on to the next one."""
    model = tiny_model(layers=1)
    random_tables(model, own_tables, generator, "gradient")
    path = default_path(model, "gradient")
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(CalibrationError, match=error):
        load(path)
    save(calibrate(model, {"x": tokens(generator, 50)}, "gradient", tokens=50), path.with_name("z.safetensors"))
    assert find(model, "gradient").about.texts[0][0] == "x"


@pytest.mark.parametrize(
    ("method", "read", "error"),
    [
        ("gradient", 400, "'short' has 350 tokens, and 400 are read"),
        ("damage", 330, "'short' has 350 tokens, and 362 are read"),
        ("damage", 200, "hardly more than the 20 that always stay: read 210 at least"),
        ("curvature", 300, "no method 'curvature'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(method, read, error, tiny_model, generator):
    with pytest.raises(ValueError, match=error):
        calibrate(tiny_model(), {"short": tokens(generator, 350)}, method, tokens=read)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "shape"), [("smollm2", (30, 3)), ("gemma3-270m", (3, 1))])
def test_the_tables_of_the_embedded_models_come_with_kvest(name, shape, dtype, monkeypatch):
    monkeypatch.delenv("KVEST_CACHE")
    monkeypatch.setattr(calibration, "home", lambda: Path("nowhere"))
    model, _ = load_embedded(name, dtype=dtype)
    for method in ("gradient", "damage"):
        table = find(model, method)
        assert (table.about.model, table.importance.shape) == (name, shape)
        assert len(table.about.texts) == 6

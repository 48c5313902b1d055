"""What the budget of each head is worth: by the gradient of the loss, or by evicting one head alone.

Either gives a table for `one_threshold(importance=...)`, of one number per KV head. `calibrate` is the map.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

import kvest
from kvest.eval.compare import divergence, forced
from kvest.eval.prefill import Prefill
from kvest.eval.scored import Scored
from kvest.hf import compat, parallel
from kvest.hf.calibration import About, Calibration
from kvest.hf.fingerprint import identity, weight_samples
from kvest.policy import Policy

POLICY = Policy.parse("h2o(values=True)/systematic/tempered(0.85)@0.5")
"""How the one head is evicted whose damage is measured; its budget is one of `KEEPS` instead."""
KEEPS = (0.5, 0.25, 0.1)
AHEAD = 32
"""Tokens after the text over which damage is averaged."""
LEAST = 1e-9
"""Nats, or variance: what is less is rounding."""
METHODS = ("gradient", "damage")


def calibrate(
    model: PreTrainedModel,
    texts: Mapping[str, Int[Tensor, "1 _"]],
    method: str,
    *,
    tokens: int = 512,
    seed: int = 0,
    name: str = "",
    on_pass: Callable[[], None] = lambda: None,
) -> Calibration:
    """A table, the mean over the beginnings of some texts; `on_pass` is called `passes` times.

    `gradient`: a_h as in `gradient`, mean over texts. `damage`: a_h = geometric mean over keeps of D_hk / V_hk, both
    means over texts first, so that a_h is the KL that a head causes per unit of its sampling variance.

    Raises ValueError for a text that is too short, or a model whose heads are split over processes.
    """
    if method not in METHODS:
        raise ValueError(f"no method {method!r} of measuring heads. Known: {', '.join(METHODS)}")
    if parallel.share(model).size > 1:
        raise ValueError("this model's heads are split over processes: calibrate it in one process")
    begin = _beginnings(texts, tokens, AHEAD if method == "damage" else 0)
    curves = None
    if method == "gradient":
        found = []
        for ids in begin.values():
            found.append(gradient(model, ids))
            on_pass()
        importance = torch.stack(found).mean(dim=0)
    else:
        both = [
            damage(model, ids, AHEAD, KEEPS, seed=seed + i, on_pass=on_pass) for i, ids in enumerate(begin.values())
        ]
        curves, variances = (torch.stack(each).mean(dim=0) for each in zip(*both, strict=True))
        importance = (curves.clamp_min(LEAST) / variances.clamp_min(LEAST)).log().mean(dim=-1).exp()
    about = About(
        method=method,
        model=name or identity(model)["model"],
        config=identity(model)["config"],
        texts=[
            [title, hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest(), ids.shape[1]]
            for title, ids in begin.items()
        ],
        seed=seed,
        policy=str(POLICY) if method == "damage" else None,
        ahead=AHEAD if method == "damage" else 0,
        keeps=list(KEEPS) if method == "damage" else [],
        versions={"kvest": kvest.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    )
    return Calibration(about, importance.float(), curves, weight_samples(model))


def _beginnings(texts: Mapping[str, Int[Tensor, "1 _"]], tokens: int, ahead: int) -> dict[str, Int[Tensor, "1 _"]]:
    """The first tokens of each text, and those after them over which damage is averaged."""
    protected = POLICY.sinks + POLICY.window
    if ahead and tokens * min(KEEPS) < protected + 1:
        raise ValueError(
            f"of {tokens} tokens a share of {min(KEEPS)} is hardly more than the {protected} that always stay: read "
            f"{math.ceil((protected + 1) / min(KEEPS))} at least"
        )
    for title, ids in texts.items():
        if ids.shape[1] < tokens + ahead:
            raise ValueError(
                f"{title!r} has {ids.shape[1]} tokens, and {tokens + ahead} are read: give a longer text, or --tokens"
            )
    return {title: ids[:, : tokens + ahead] for title, ids in texts.items()}


def _sha256(ids: Int[Tensor, "1 n"]) -> str:
    return hashlib.sha256(ids.long().cpu().numpy().tobytes()).hexdigest()


def passes(model: PreTrainedModel, method: str, texts: int) -> int:
    """How often `calibrate` says that it has come further."""
    config = compat.text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return texts * (1 if method == "gradient" else len(compat.stock_layers(model)[1]) * heads * len(KEEPS))


def gradient(model: PreTrainedModel, ids: Int[Tensor, "1 n"]) -> Float[Tensor, "l h"]:
    """a_h = mean_g mean_j norm(dL / do_jg) norm(o_jg)

    o_jg is the output of query head g for token j, as it enters the output projection, and L the summed loss of the
    next tokens of the text. One pass forward and one back; parameters get no gradients and no hook stays.
    """
    if ids.shape[1] < 2:
        raise ValueError(f"the loss of the next token needs 2 tokens at least, and the text has {ids.shape[1]}")
    modules = output_modules(model)
    outputs: dict[int, Tensor] = {}
    with ExitStack() as stack, torch.enable_grad():
        for index, module in modules.items():
            stack.callback(module.register_forward_pre_hook(_keep_input(outputs, index)).remove)
        stack.callback(model.get_input_embeddings().register_forward_hook(_begin_graph).remove)
        ids = ids.to(model.device)
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        loss = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        found = [outputs[index] for index in modules]
        felt = torch.autograd.grad(loss, found)
    heads = [_by_head(model, f, o) for f, o in zip(felt, found, strict=True)]
    return torch.stack(heads)


def _keep_input(outputs: dict[int, Tensor], index: int) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        outputs[index] = inputs[0]

    return hook


def _begin_graph(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Gradients reach the heads even where no parameter asks for one."""
    return output.detach().requires_grad_()


def _by_head(model: PreTrainedModel, felt: Tensor, output: Tensor) -> Float[Tensor, "h"]:
    config = compat.text_config(model)
    queries = config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or queries

    def norms(x: Tensor) -> Float[Tensor, "n hg"]:
        return torch.linalg.vector_norm(x.detach()[0].float().reshape(x.shape[1], queries, -1), dim=-1)

    return (norms(felt) * norms(output)).mean(dim=0).reshape(heads, -1).mean(dim=1).cpu()


def output_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The output projections of the layers that can be evicted, by the layer's index.

    Raises UnsupportedModel where a layer has none that kvest knows.
    """
    _, evictable = compat.stock_layers(model)
    found = {}
    for module in model.modules():
        output = compat.output_module(module) if getattr(module, "layer_idx", None) in evictable else None
        if output is not None:
            found[module.layer_idx] = output
    missing = [index for index in evictable if index not in found]
    if missing:
        raise compat.UnsupportedModel(
            model, f"kvest found no output projection in its layer {missing[0]}", "Calibrate by --method damage"
        )
    return {index: found[index] for index in evictable}


def damage(
    model: PreTrainedModel,
    ids: Int[Tensor, "1 n"],
    ahead: int,
    keeps: Sequence[float],
    *,
    seed: int = 0,
    on_pass: Callable[[], None] = lambda: None,
) -> tuple[Float[Tensor, "l h k"], Float[Tensor, "l h k"]]:
    """D_hk = KL(whole cache || head h alone evicted to keep_k) of the next token, mean over the last `ahead` tokens

    V_hk = sum_i x_i^2 (1 / pi_i - 1), the variance of that head's sample by its own scores, comes second. The tokens
    before the last ones are read once; every head and keep costs one pass over the last ones, without gradients.
    """
    read = Scored(Prefill(model, ids[:, :-ahead].to(model.device)), POLICY)
    following = ids[:, -ahead:].to(model.device)
    with read.evicted({}) as cache:
        want = forced(model, cache, following)
    shape = len(read.observations), read.observations[0].keys.shape[1], len(keeps)
    harm, variance = torch.zeros(shape), torch.zeros(shape)
    for layer, head, k in itertools.product(*map(range, shape)):
        counts = read.one_head(layer, head, keeps[k])
        variance[layer, head, k] = read.variance(layer, counts)[0, head]
        with read.evicted({layer: counts}, seed) as cache:
            harm[layer, head, k] = divergence(want, forced(model, cache, following)).mean()
        on_pass()
    return harm, variance

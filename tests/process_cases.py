"""What every process of test_processes.py runs, and what one process runs to compare with.

Started by torchrun with a folder of models; each process writes what it saw beside them.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import jaxtyping
import torch

CHECKED = jaxtyping.install_import_hook("kvest", "beartype.beartype") if __name__ == "__main__" else None

from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel  # noqa: E402

import kvest  # noqa: E402
from hf_tools import POLICIES, feed, tokens  # noqa: E402

STANDING = (
    "h2o(values=True)+one_threshold/systematic/tempered(0.85)@0.25, every=16",
    "last_query(layer=True)/systematic/inclusion@0.3, every=16",
    "snapkv+one_threshold/poisson/inclusion@0.3, every=16",
)
"""Later rounds, in which heads hold different positions and different numbers of them."""

ONCE = (*POLICIES, "last_query(values=False, layer=True)/top_k/none@0.3")
WEIGHED = "h2o(values=True)+one_threshold(importance=damage)/systematic/tempered(0.85)@0.25, every=16"
"""Needs a table, of which each process takes the part of its own heads."""

BYTES = 24 * 1024
IN_BYTES = f"h2o(values=True)+one_threshold/systematic/inclusion@{BYTES}B"
GENERATED = 12


def prompts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(two rows of 61 and 97 tokens with padding in front, their mask, a continuation of 41)."""
    generator = torch.Generator().manual_seed(7)
    ids, more = tokens(generator, 97, rows=2), tokens(generator, 41, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :36] = 0
    return ids.masked_fill(mask == 0, 0), mask, more


def padded_batch(model: PreTrainedModel, policy: str) -> dict[str, Any]:
    """A padded prompt, a question of several tokens, and token by token: reports after each, and all logits."""
    ids, mask, more = prompts()
    cache = kvest.EvictionCache(model, policy, seed=5)
    logits = [feed(model, cache, ids, mask)]
    reports = [cache.report(all_processes=True)]
    for part in (more[:, :23], *more[:, 23:].split(1, dim=1)):
        mask = torch.cat([mask, torch.ones_like(part)], dim=1)
        logits.append(feed(model, cache, part, mask))
    reports.append(cache.report(all_processes=True))
    return {"reports": reports, "logits": torch.cat(logits, dim=1), "own": cache.report()}


def one_prompt(model: PreTrainedModel, policy: str) -> dict[str, Any]:
    """One row without padding, right after its eviction; a copy of the cache decodes as the cache does."""
    ids, _, more = prompts()
    cache = kvest.EvictionCache(model, policy, seed=5)
    logits = feed(model, cache, ids[1:])
    reports = [cache.report(all_processes=True)]
    other = copy.deepcopy(cache)
    same = torch.equal(feed(model, cache, more[1:, :3]), feed(model, other, more[1:, :3]))
    return {"reports": reports, "logits": logits, "copied": same}


def whole(model: PreTrainedModel) -> bool:
    """Whether keeping everything is the stock cache, bit for bit."""
    ids, mask, _ = prompts()
    cache = kvest.EvictionCache(model, "uniform/systematic/inclusion@1.0")
    return torch.equal(feed(model, cache, ids, mask), feed(model, DynamicCache(config=model.config), ids, mask))


def generated(model: PreTrainedModel, policy: str) -> list[int]:
    ids, _, _ = prompts()
    cache = kvest.EvictionCache(model, policy, seed=5)
    out = model.generate(
        ids[1:], attention_mask=torch.ones_like(ids[1:]), past_key_values=cache, max_new_tokens=GENERATED
    )
    return out[0, ids.shape[1] :].tolist()


def refusal(make: Any) -> str:
    """What the error says."""
    try:
        make()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def by_torch(model: PreTrainedModel) -> PreTrainedModel:
    """Split by torch's own means, of which transformers knows nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    attention = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan = {**attention, "self_attn.o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (2,)), plan)
    return model


def main(folder: Path) -> None:
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    def load(name: str, **config: Any) -> PreTrainedModel:
        split = DistributedConfig(**(config or {"tp_size": 2}))
        return AutoModelForCausalLM.from_pretrained(folder / name, distributed_config=split, dtype=torch.float32).eval()

    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    model = load("llama")
    seen["llama"] = {policy: padded_batch(model, policy) for policy in (*ONCE, *STANDING)}
    seen["llama"][WEIGHED] = padded_batch(model, WEIGHED)
    seen["olmo2"] = {STANDING[0]: padded_batch(load("olmo2"), STANDING[0])}
    plain = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32).eval()
    seen["by torch"] = {ONCE[1]: padded_batch(by_torch(plain), ONCE[1])}
    seen["bytes"] = {"llama": one_prompt(model, IN_BYTES), "gemma3": one_prompt(load("gemma3"), IN_BYTES)}
    seen["whole"] = whole(model)
    seen["generated"] = generated(model, ONCE[1])
    seen["three heads"] = refusal(lambda: kvest.EvictionCache(load("three"), ONCE[0]))
    seen["layers"] = refusal(lambda: kvest.EvictionCache(load("llama", pp_size=2), ONCE[0]))
    if dist.get_rank() == 1:  # only this process sees values that are not finite, before they reach the other
        model.model.layers[0].self_attn.v_proj.weight.to_local().fill_(torch.nan)
    seen["not finite"] = refusal(lambda: padded_batch(model, ONCE[1]))
    torch.save(seen, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))

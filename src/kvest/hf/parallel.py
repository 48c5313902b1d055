"""Which of a layer's heads this process holds, where transformers or torch split them over several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from kvest.hf import compat
from kvest.types import Split

KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
"""Modules whose outputs are the keys: a shard of their weight is a share of the heads."""


@dataclass(frozen=True)
class Share:
    """This process's share of the KV heads: part `rank` of `size`, of the `heads` that a layer has in all (0: no layer
    is split, and the number does not matter).

    A copied cache belongs to the same group: copies share it.
    """

    rank: int = 0
    size: int = 1
    heads: int = 0
    group: Any = field(default=None, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Share:
        return self

    @property
    def first_head(self) -> int:
        """The first head of this process."""
        return self.rank * self.heads // self.size

    @property
    def split(self) -> Split:
        """The same as the stages know it."""
        return Split(self.rank, self.gather) if self.size > 1 else Split()

    def gather(self, x: Tensor) -> list[Tensor]:
        """`x` of every process, in the order of heads."""
        wire = x.to(torch.uint8) if x.dtype == torch.bool else x.contiguous()
        parts = [torch.empty_like(wire) for _ in range(self.size)]
        dist.all_gather(parts, wire, group=self.group)
        return [part.to(x.dtype) for part in parts]

    def gather_values(self, x: Any) -> list[Any]:
        """As `gather`, for anything that pickles."""
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, x, group=self.group)
        return parts

    def check(self, heads: int) -> None:
        """Raise where a layer's keys do not have the heads of this share."""
        if self.heads and heads * self.size != self.heads:
            raise RuntimeError(
                f"a layer has {heads} KV heads in this process, not {self.heads // self.size} of {self.heads} for each "
                f"of {self.size} processes: kvest does not know which they are. Load the model with transformers' own "
                "tensor parallel plan"
            )


def share(model: PreTrainedModel) -> Share:
    """Found on the weights: a key projection that is sharded over a device mesh.

    Raises UnsupportedModel where heads would be cut, or layers are split.
    """
    if (getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1) > 1:
        raise compat.UnsupportedModel(
            model,
            "its layers are split over processes (pipeline parallelism), and no process sees a whole pass",
            "Split its heads instead (tp_plan='auto')",
        )
    config = compat.text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    mesh, whole = _mesh(model)
    if mesh is None or whole:
        split = mesh is not None or (getattr(model, "_tp_size", None) or 1) > 1
        return Share(heads=heads if split else 0)
    if heads % mesh.size():
        raise compat.UnsupportedModel(
            model,
            f"its {heads} KV heads cannot be split over {mesh.size()} processes without cutting or repeating heads",
            f"Use a number of processes that divides {heads}",
        )
    return Share(mesh.get_local_rank(), mesh.size(), heads, mesh.get_group())


def _mesh(model: PreTrainedModel) -> tuple[Any, bool]:
    """(the processes that share the key projections, whether each of them gets all their outputs)."""
    plan = getattr(model, "tp_plan", None) or {}
    gathered = {name.split(".")[-1] for name, style in plan.items() if style not in ("colwise", "packed_colwise")}
    for name, module in model.named_modules():
        kind = name.split(".")[-1]
        placements = getattr(getattr(module, "weight", None), "placements", None)
        if kind not in KEY_PROJECTIONS or placements is None:
            continue
        mesh, placement = module.weight.device_mesh, placements[-1]
        names = mesh.mesh_dim_names or ("tp",)
        if "tp" not in names or not placement.is_shard():
            continue  # sharded to save memory only: a forward pass sees whole weights
        mesh = mesh["tp"] if mesh.ndim > 1 else mesh
        if mesh.size() > 1:
            return mesh, kind in gathered
    return None, False

"""Tables of what each head's budget is worth: measured once per model, found again by its weights.

`kvest calibrate MODEL` writes one. Those of the embedded models come with the package; those that were measured here
lie in the user's cache directory, which is looked at first. A table belongs to a model when numbers sampled from all of
its weights agree up to the rounding of bfloat16: so it holds for every dtype, machine and release of transformers, and
not for a fine-tuned relative. Where weights cannot be looked at (offloaded, or split over processes), the fingerprint
of the config decides.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import safetensors
import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvest.hf import compat, parallel
from kvest.hf.embedded import cache_home
from kvest.hf.fingerprint import identity, weight_samples
from kvest.hf.storage import whole_file

FORMAT = "kvest-calibration"
VERSION = "1"
ROUNDING = 2.0**-7
"""Of a weight, relative: twice what rounding to bfloat16 may do to it."""


class CalibrationError(ValueError):
    """No table for this model, or a file that is none: says what to run."""


@dataclass(frozen=True)
class About:
    """What a table says about itself.

    `texts` are (name, sha256 of the tokens, tokens) of what it was measured on, `keeps` the shares of entries that a
    curve of damage has values for.
    """

    method: str
    model: str
    config: str
    texts: list[list[Any]]
    seed: int
    policy: str | None
    ahead: int
    keeps: list[float]
    versions: dict[str, str]


@dataclass(frozen=True)
class Calibration:
    """`importance[l, h]` of every KV head of the layers that are evicted; `damage[l, h, k]` where it was measured."""

    about: About
    importance: Float[Tensor, "l h"]
    damage: Float[Tensor, "l h k"] | None
    weights: Float[Tensor, "n"] | None

    def belongs_to(self, model: PreTrainedModel) -> bool:
        """Whether this was measured on the model."""
        mine = weight_samples(model)
        if mine is None or self.weights is None:
            return self.about.config == identity(model)["config"]
        return same_weights(self.weights, mine)


def same_weights(x: Float[Tensor, "n"], y: Float[Tensor, "m"]) -> bool:
    """Whether two samples are of the same weights, in any dtype."""
    if x.shape != y.shape:
        return False
    tiny = 1e-6 * float(x.abs().max())
    return bool(((x - y).abs() <= ROUNDING * torch.maximum(x.abs(), y.abs()) + tiny).all())


def find(model: PreTrainedModel, method: str) -> Calibration:
    """The table of this model by this method: the user's own first, then those that come with kvest.

    Raises CalibrationError where there is none.
    """
    for path in _tables():
        try:
            found = load(path)
        except CalibrationError:
            continue  # a file of another version; a lookup by its path says so
        if found.about.method == method and found.belongs_to(model):
            return found
    name = model.config._name_or_path or "MODEL"
    raise CalibrationError(
        f"{type(model).__name__} has no table of what its heads' budgets are worth (method {method}): run "
        f"kvest calibrate {name} --method {method}, or leave importance out of the policy"
    )


def home() -> Path:
    """Where `kvest calibrate` writes."""
    return cache_home() / "calibration"


def default_path(model: PreTrainedModel, method: str) -> Path:
    """A name for the table of these weights by this method."""
    known = identity(model)
    kind = getattr(compat.text_config(model), "model_type", "model")
    return home() / f"{kind}-{(known['weights'] or known['config'])[:12]}-{method}.safetensors"


def shipped() -> Path:
    """Where the tables of the embedded models are."""
    return Path(str(files("kvest"))) / "calibration"


def _tables() -> Iterator[Path]:
    for folder in (home(), shipped()):
        yield from sorted(folder.glob("*.safetensors"))


def importance(model: PreTrainedModel, method: str) -> list[Float[Tensor, "h"]]:
    """Of the heads of this process, for each layer that is evicted."""
    share = parallel.share(model)
    table = find(model, method).importance
    own = table.shape[1] // share.size
    return list(table[:, share.rank * own : (share.rank + 1) * own])


def save(table: Calibration, path: str | os.PathLike[str]) -> None:
    """Write a table, whole or not at all."""
    tensors = {name: x for name in ("importance", "damage", "weights") if (x := getattr(table, name)) is not None}
    tensors = {name: x.float().contiguous().cpu() for name, x in tensors.items()}
    text = json.dumps(asdict(table.about), sort_keys=True)
    metadata = {"format": FORMAT, "version": VERSION, "about": text, "sha256": _digest(text, tensors)}
    with whole_file(Path(path)) as scratch:
        save_file(tensors, scratch, metadata=metadata)


def load(path: str | os.PathLike[str]) -> Calibration:
    """Raises CalibrationError where the file is no table, of another version, or was changed."""
    anew = f"cannot read a table of importance from {os.fspath(path)!r}: {{}}. kvest calibrate MODEL writes one"
    try:
        with safetensors.safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise CalibrationError(anew.format(f"it is no safetensors file ({error})")) from None
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise CalibrationError(anew.format("it is none, or of another version of kvest"))
    text = metadata.get("about", "")
    if metadata.get("sha256") != _digest(text, tensors):
        raise CalibrationError(anew.format("it was changed after it was written, its checksum does not match"))
    return Calibration(About(**json.loads(text)), tensors["importance"], tensors.get("damage"), tensors.get("weights"))


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(f"{FORMAT} {VERSION} {text}".encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {tuple(x.shape)}".encode())
        digest.update(x.contiguous().numpy().tobytes())
    return digest.hexdigest()

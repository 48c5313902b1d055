"""A cache in a file: safetensors, whose header says what it is, of which model, and how far it has read.

The file is written whole or not at all. Whoever reads one gets the cache that was saved, bit for bit, or an error that
says why not: the header carries a checksum of everything, and a fingerprint of the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import kvest
from kvest.hf import parallel
from kvest.hf.fingerprint import identity
from kvest.hf.layer import EvictionLayer
from kvest.hf.session import STATE

if TYPE_CHECKING:
    from kvest.hf.cache import EvictionCache

FORMAT = "kvest-cache"
VERSION = 1


class CacheFileError(ValueError):
    """A file that cannot be read as a cache of this model: names the file, the reason and the way out."""

    def __init__(self, path: str | os.PathLike[str], reason: str, way_out: str) -> None:
        super().__init__(f"cannot load a cache from {os.fspath(path)!r}: {reason}. {way_out}")


@dataclass(frozen=True)
class CacheHeader:
    """What a cache file says about itself; `kvest.cache_header(path)` reads it without the tensors.

    `seen` counts the real tokens of each row. `config` and `weights` are fingerprints of the model (`weights` is None
    where some are not in memory), `notes` what the caller of `save` had to say.
    """

    policy: str
    seed: int
    seen: list[int]
    model: str
    config: str
    weights: str | None
    dtype: str
    kvest: str
    transformers: str
    notes: dict[str, Any]
    session: dict[str, Any]
    layers: list[dict[str, Any]]


def save(cache: EvictionCache, model: PreTrainedModel, path: str | os.PathLike[str], notes: Mapping[str, Any]) -> None:
    """Write the cache to `path`, atomically."""
    state = cache.session.state()
    tensors: dict[str, Tensor] = {}
    layers = [_describe(layer, f"layers.{i}.", tensors) for i, layer in enumerate(cache.layers)]
    session = {name: _pack(x, f"session.{name}", tensors) for name, x in state.items()}
    tensors = {name: x.detach().contiguous().cpu() for name, x in tensors.items()}
    header = CacheHeader(
        policy=str(cache.policy),
        seed=cache.session.seed,
        seen=list(cache.session.seen),
        **identity(model),
        dtype=_dtype(cache.layers) or str(model.dtype).removeprefix("torch."),
        kvest=kvest.__version__,
        transformers=transformers.__version__,
        notes=dict(notes),
        session=session,
        layers=layers,
    )
    try:
        text = json.dumps(asdict(header), sort_keys=True)
    except TypeError as error:
        raise ValueError(f"what is saved must be plain values, notes as well: {error}") from None
    metadata = {"format": FORMAT, "version": str(VERSION), "header": text, "sha256": _digest(text, tensors)}
    _write(Path(path), tensors, metadata)


def load(path: str | os.PathLike[str], model: PreTrainedModel) -> EvictionCache:
    """The cache that was saved, for the same model."""
    from kvest.hf.cache import EvictionCache

    header, tensors = _read(path, tensors=True)
    if parallel.share(model).size > 1:
        raise CacheFileError(
            path, "it holds all heads, and this model's are split over processes", "Load the model in one process"
        )
    _check(path, header, model)
    try:
        return _cache(path, header, tensors, EvictionCache(model, header.policy, seed=header.seed), model)
    except (KeyError, TypeError) as error:
        raise CacheFileError(path, f"its header does not describe its tensors ({error!r})", "Save it anew") from None


def _cache(
    path: str | os.PathLike[str],
    header: CacheHeader,
    tensors: dict[str, Tensor],
    cache: EvictionCache,
    model: PreTrainedModel,
) -> EvictionCache:
    """`cache`, which is new, filled."""
    kinds = [type(layer).__name__ for layer in cache.layers]
    saved = [record["kind"] for record in header.layers]
    if saved != kinds:
        raise CacheFileError(
            path,
            f"its layers are {', '.join(saved)} (transformers {header.transformers}), and those of the model "
            f"{', '.join(kinds)} ({transformers.__version__})",
            "Save it anew",
        )
    home, devices = device(model), _devices(model)
    for i, (layer, record) in enumerate(zip(cache.layers, header.layers, strict=True)):
        prefix = f"layers.{i}."
        mine = {name: x.to(devices.get(i, home)) for name, x in tensors.items() if name.startswith(prefix)}
        _restore(layer, prefix, record, mine)
    flags = {name: x.to(home) for name, x in tensors.items() if name.startswith("session.")}
    cache.session.restore({name: _unpack(header.session[name], flags) for name in STATE})
    return cache


def cache_header(path: str | os.PathLike[str]) -> CacheHeader:
    """What a cache file says about itself, read without its tensors (so that the checksum is not looked at).

    Raises CacheFileError (a ValueError) where it is no cache file of a known version.
    """
    return _read(path, tensors=False)[0]


# -- layers


def _describe(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Plain values of one layer; its tensors go to `tensors`."""
    record = {"kind": type(layer).__name__}
    if isinstance(layer, EvictionLayer):
        values, mine = layer.saved()
        tensors |= {prefix + name: x for name, x in mine.items()}
        return {**record, **values}
    held = {name: x for name, x in vars(layer).items() if name not in ("dtype", "device")}
    return {**record, **{name: _pack(x, prefix + name, tensors) for name, x in held.items()}}


def _restore(layer: Any, prefix: str, record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    values = {name: x for name, x in record.items() if name != "kind"}
    if isinstance(layer, EvictionLayer):
        layer.load(values, {name.removeprefix(prefix): x for name, x in tensors.items()})
        return
    vars(layer).update({name: _unpack(x, tensors) for name, x in values.items() if name in vars(layer)})
    states = [x for x in tensors.values() if x.is_floating_point()]
    if states:
        layer.dtype, layer.device = states[0].dtype, states[0].device


def _pack(x: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`x` as JSON can hold it; its tensors go to `tensors`, under names that begin with `name`."""
    if isinstance(x, Tensor):
        tensors[name] = x
        return {"tensor": name}
    if isinstance(x, list | tuple):
        return [_pack(each, f"{name}.{i}", tensors) for i, each in enumerate(x)]
    if isinstance(x, dict):
        return {"dict": [[key, _pack(each, f"{name}.{key}", tensors)] for key, each in x.items()]}
    return x


def _unpack(x: Any, tensors: dict[str, Tensor]) -> Any:
    """What `_pack` was given (tuples come back as lists)."""
    if isinstance(x, list):
        return [_unpack(each, tensors) for each in x]
    if isinstance(x, dict):
        return tensors[x["tensor"]] if "tensor" in x else {key: _unpack(each, tensors) for key, each in x["dict"]}
    return x


def _dtype(layers: list[Any]) -> str | None:
    """Of the keys that are held."""
    held = (getattr(layer, "dtype", None) for layer in layers if getattr(layer, "is_initialized", False))
    return next((str(dtype).removeprefix("torch.") for dtype in held if dtype is not None), None)


def device(model: PreTrainedModel) -> torch.device:
    """Where the model computes; offloaded weights are on none."""
    held = (x.device for x in (*model.parameters(), *model.buffers()) if x.device.type != "meta")
    return next(held, torch.device("cpu"))


def _devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each layer's attention computes, as far as its weights tell (offloaded ones do not)."""
    found = {}
    for module in model.modules():
        index, weight = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(index, int) and weight is not None and weight.device.type != "meta":
            found[index] = weight.device
    return found


def _check(path: str | os.PathLike[str], header: CacheHeader, model: PreTrainedModel) -> None:
    """Raise CacheFileError where the file belongs to another model, or to this one in another dtype."""
    dtype = str(model.dtype).removeprefix("torch.")
    mine = identity(model)
    written = f"It was saved with kvest {header.kvest} and transformers {header.transformers}"
    if header.config != mine["config"]:
        raise CacheFileError(
            path,
            f"it belongs to {header.model}, whose config differs from that of this {mine['model']}",
            f"{written} (this is {transformers.__version__}): load it with that model, or save it anew",
        )
    if header.dtype != dtype:
        raise CacheFileError(
            path,
            f"it holds {header.dtype}, and the model computes in {dtype}",
            f"Load the model with dtype=torch.{header.dtype}, or save it anew",
        )
    if None not in (header.weights, mine["weights"]) and header.weights != mine["weights"]:
        raise CacheFileError(
            path,
            f"it belongs to {header.model} with other weights than this {mine['model']}",
            f"{written}: save it anew",
        )


# -- the file


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {str(path)!r}: no folder {str(path.parent)!r}")
    with whole_file(path) as scratch:
        save_file(tensors, scratch, metadata=metadata)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place once it is written, with the mode of any new file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        with scratch.open("rb+") as file:
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        scratch.chmod(0o666 & ~mask)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _read(path: str | os.PathLike[str], *, tensors: bool) -> tuple[CacheHeader, dict[str, Tensor]]:
    if not Path(path).is_file():
        raise CacheFileError(path, "there is no such file", "cache.save(path) writes one")
    anew = "Save the cache anew"
    try:
        # cloned: what safetensors gives is a view of the file, which others may write to
        with safetensors.safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            held = {name: file.get_tensor(name).clone() for name in file.keys()} if tensors else {}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise CacheFileError(path, f"it is cut off, or no safetensors file at all ({error})", anew) from None
    if metadata.get("format") != FORMAT:
        raise CacheFileError(path, "it is a safetensors file, but no kvest cache", "cache.save(path) writes one")
    if metadata.get("version") != str(VERSION):
        raise CacheFileError(
            path,
            f"it has format {metadata.get('version')}, and kvest {kvest.__version__} knows format {VERSION}",
            "Read it with the version of kvest that wrote it, or save the cache anew",
        )
    text = metadata.get("header", "")
    if tensors and metadata.get("sha256") != _digest(text, held):
        raise CacheFileError(path, "it was changed after it was written: its checksum does not match", anew)
    try:
        return CacheHeader(**json.loads(text)), held
    except (ValueError, TypeError) as error:
        raise CacheFileError(path, f"its header cannot be read ({error})", anew) from None


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    """sha256 of the header and of every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(f"{FORMAT} {VERSION} {header}".encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        if x.numel():
            digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

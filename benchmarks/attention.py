"""One decode step of attention over a store, against torch's sdpa over as many exact entries.

The baseline has its query heads packed as [1, h, g, d] and no bias: the fastest way torch has on a CPU. `equal` holds
the same number of entries in every head, `1:4` numbers that grow from head to head by four times, at the same total.
Both contain 16 exact entries that were appended after the eviction.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from harness import arguments, finish, ratios
from kvest.attend import attend
from kvest.retain import Store
from kvest.types import Retained

SHAPES = {"SmolLM2-135M": (3, 3, 64), "Llama-3-8B": (8, 4, 128)}
ENTRIES = (1024, 4096, 32768)
DTYPES = (torch.float32, torch.bfloat16)


def store_of(counts: list[int], d: int, dtype: torch.dtype) -> Store:
    """A store with these counts and random log weights, 16 entries of each head appended."""
    total, h, tail = sum(counts), len(counts), 16
    retained = Retained(
        keys=torch.randn(total - h * tail, d, dtype=dtype),
        values=torch.randn(total - h * tail, d, dtype=dtype),
        log_weights=torch.rand(total - h * tail) * 3,
        positions=torch.arange(total - h * tail, dtype=torch.int32),
        counts=(tuple(n - tail for n in counts),),
    )
    store = Store(retained)
    for i in range(tail):
        new = torch.randn(1, h, 1, d, dtype=dtype)
        store.append(new, new, torch.tensor([[total + i]]))
    return store


def uneven(h: int, total: int) -> list[int]:
    """Counts that grow linearly from the first head to the last, which has four times as many."""
    shares = torch.linspace(1.0, 4.0, h)
    counts = (shares / shares.sum() * total).long().tolist()
    return [*counts[:-1], counts[-1] + total - sum(counts)]


def main() -> None:
    options = arguments(__doc__ or "")
    rows = []
    for dtype in DTYPES:
        for shape, (h, g, d) in SHAPES.items():
            for entries in ENTRIES:
                query = torch.randn(1, h * g, 1, d, dtype=dtype)
                packed = query.view(1, h, g, d)
                keys, values = (torch.randn(1, h, entries, d, dtype=dtype) for _ in range(2))
                equal = store_of([entries] * h, d, dtype)
                mixed = store_of(uneven(h, h * entries), d, dtype)
                scale = d**-0.5
                found = ratios(
                    lambda q=packed, k=keys, v=values: scaled_dot_product_attention(q, k, v),
                    {
                        "equal": lambda q=query, s=equal, c=scale: attend(q, s, c),
                        "1:4": lambda q=query, s=mixed, c=scale: attend(q, s, c),
                    },
                )
                read = keys.nbytes + values.nbytes
                row = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "shape": shape,
                    "entries_per_head": entries,
                    "bytes_read": read,
                    "sdpa_us": found["baseline"].seconds * 1e6,
                    "sdpa_gb_per_s": read / found["baseline"].seconds / 1e9,
                    **{name: vars(found[name]) for name in ("equal", "1:4")},
                }
                rows.append(row)
                print(
                    f"{row['dtype']:<9} {shape:<13} {entries:>6} entries  sdpa {row['sdpa_us']:>8.0f} us "
                    f"{row['sdpa_gb_per_s']:>5.1f} GB/s  equal {found['equal']}  1:4 {found['1:4']}",
                    flush=True,
                )
    finish(rows, options.json)


if __name__ == "__main__":
    main()

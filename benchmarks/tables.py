"""Write what the benchmarks found into the documents: every table between `<!-- name -->` and `<!-- /name -->`.

The records are docs/benchmarks/*.json: of `make bench`, `make needles`, `make importance`, and of the demo by
`kvest compare --json docs/benchmarks/demo.json`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvest.cli.explain import documented
from kvest.grammar import TABLES as PARTS

KINDS = {f"{kind}s": parts for kind, parts in PARTS.items()}
"""What there is of each kind: `proposals`, `allocations`, ..."""
ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "benchmarks"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
Row = dict[str, Any]


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all columns but the first to the right."""
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def code(text: str) -> str:
    return f"`{text}`" if "/" in text else text


def interval(ratio: Row) -> str:
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def attention(rows: list[Row]) -> str:
    headings = ["shape", "dtype", "entries per head", "sdpa, us", "equal counts / sdpa", "counts 1:4 / sdpa"]
    cells = [
        [
            r["shape"],
            r["dtype"],
            f"{r['entries_per_head']:,}",
            f"{r['sdpa_us']:,.0f}",
            interval(r["equal"]),
            interval(r["1:4"]),
        ]
        for r in rows
    ]
    return table(headings, cells)


def eviction(rows: list[Row]) -> str:
    headings = ["policy", "time / prefill", "extra memory / whole cache"]
    cells = [
        [code(r["policy"]), f"{r['share_of_prefill']:.1%}", f"{max(0.0, r['extra_share_of_cache']):.1%}"] for r in rows
    ]
    return table(headings, cells)


def decode(rows: list[Row]) -> str:
    headings = ["cache", "batch", "tokens/s", "speed-up", "ideal", "MiB held"]
    cells = [
        [
            code(r["policy"]),
            str(r["batch"]),
            f"{r['tokens_per_s']:.1f}",
            f"{r['speedup']:.2f} [{r['speedup_low']:.2f}, {r['speedup_high']:.2f}]",
            f"{r['ideal']:.2f}",
            f"{r['held_bytes'] / 2**20:,.0f}",
        ]
        for r in rows
    ]
    return table(headings, cells)


def memory(rows: list[Row]) -> str:
    headings = ["policy", "dtype", "keep", "bytes held", "counted from outside", "over keep x full"]
    cells = [
        [
            code(r["policy"]),
            r["dtype"],
            str(r["keep"]),
            f"{r['kept_bytes']:,}",
            f"{r['counted_bytes']:,}",
            f"{r['over_keep_times_full']:+.2%}",
        ]
        for r in rows
        if "kept_bytes" in r
    ]
    peaks = [
        [code(r["policy"]), r["dtype"].removeprefix("torch."), f"{r['prompt_peak_bytes'] / 2**20:,.0f}"]
        for r in rows
        if "prompt_peak_bytes" in r
    ]
    return table(headings, cells) + "\n\n" + table(["reading the prompt", "dtype", "peak, MiB"], peaks)


def needles(rows: list[Row]) -> str:
    kinds = list(dict.fromkeys(r["document"] for r in rows))
    by = {(r["policy"], r["document"]): r for r in rows}
    cells = []
    for policy in dict.fromkeys(r["policy"] for r in rows):
        found = [by[policy, kind] for kind in kinds]
        cells.append([code(policy), *(f"{r['right']} of {r['n']} [{r['low']:.2f}, {r['high']:.2f}]" for r in found)])
    return table(["policy", *kinds], cells)


def importance(rows: list[Row]) -> str:
    headings = [
        "proposal",
        "allocation",
        "part of the table",
        "keep",
        "KL (nats/token)",
        "ratio to none [95 %]",
        "less in",
    ]
    cells = [
        [
            f"`{r['proposal']}`",
            f"`{r['allocate']}`",
            r["part"] if r["allocate"].count("importance") else "",
            str(r["keep"]),
            f"{r['kl_nats']:.3f} ± {r['kl_error']:.3f}",
            f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" if "ratio" in r else "1",
            f"{r['less_in']} of {r['n']}" if "ratio" in r else "",
        ]
        for r in rows
    ]
    return table(headings, cells)


def demo(rows: list[Row]) -> str:
    headings = ["policy", "kept per head", "MiB held", "KL (nats/token)", "tokens/s", "finds it"]
    cells = []
    for r in rows:
        spread = "" if r["kept_min"] == r["kept_max"] else f" ({r['kept_min']:,}-{r['kept_max']:,})"
        kl = "0" if r["kl_nats"] == 0 else f"{r['kl_nats']:.4f} ± {r['kl_error']:.4f}"
        number = "77013" in r["answer"]
        cells.append(
            [
                code(r["policy"]),
                f"{r['kept_mean']:,.0f}{spread}",
                f"{r['kept_bytes'] / 2**20:.1f}",
                kl,
                f"{r['tokens_per_s']:.1f}",
                "yes" if number else "no",
            ]
        )
    return table(headings, cells)


def parity(rows: list[Row]) -> str:
    headings = [
        "press",
        "here",
        "same sets",
        "but for the latest entry",
        "overlap",
        "through the bridge",
        "why they differ",
    ]
    cells = []
    for r in rows:
        same, but, overlap = (f"{r[name]:.1%}" for name in ("same_heads", "same_but_latest", "overlap"))
        bridge = f"{r['bridge']['same_but_latest']:.1%}" if "bridge" in r else ""
        note = r["note"] + (f" (two runs of the press overlap by {r['itself']:.1%})" if "itself" in r else "")
        cells.append([r["press"], code(r["policy"]), same, but, overlap, bridge, note])
    return table(headings, cells)


def costs() -> str:
    """The two records of `make costs` side by side."""
    lengths = (2048, 8192)
    records = [json.loads((RECORDS / f"costs-{n}.json").read_text()) for n in lengths]
    by = [{r["policy"]: r for r in record["rows"]} for record in records]
    headings = ["policy", *(f"time / prefill, {n:,}" for n in lengths), *(f"memory / cache, {n:,}" for n in lengths)]
    cells = []
    for policy in by[0]:
        found = [rows[policy] for rows in by]
        shares = [f"{r['share_of_prefill']:.1%} [{r['share_low']:.1%}, {r['share_high']:.1%}]" for r in found]
        cells.append([code(policy), *shares, *(f"{max(0.0, r['extra_share_of_cache']):.1%}" for r in found)])
    return f"{table(headings, cells)}\n\nConditions: {said(records[0])}; {by[0][policy]['rounds']} rounds."


def methods(kind: str) -> str:
    """Every method of a kind, from its own docstring."""
    cells = []
    for name, part in KINDS[kind].items():
        found = documented(part)
        words = [found[key].replace("|", "\\|").replace("\n", " ") for key in ("formula", "source", "unlike")]
        cells.append([f"`{name}`", *words])
    headings = ["name", "formula", "source", "unlike the paper"]
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "parity": parity,
    "attention": attention,
    "eviction": eviction,
    "decode": decode,
    "memory": memory,
    "needles": needles,
    "importance": importance,
    "demo": demo,
}


def said(record: Row) -> str:
    """The conditions that a record was taken under."""
    return ", ".join(f"{key} {value}" for key, value in record["conditions"].items())


def render(name: str) -> str:
    """A table, and the conditions under one that was measured."""
    if name in KINDS:
        return f"\n{methods(name)}\n"
    if name == "costs":
        return f"\n{costs()}\n"
    record = json.loads((RECORDS / f"{name}.json").read_text())
    return f"\n{TABLES[name](record['rows'])}\n\nConditions: {said(record)}.\n"


def there(name: str) -> bool:
    """Whether there is something to make the table from."""
    records = {"costs": ("costs-2048", "costs-8192")}.get(name, (name,))
    return name in KINDS or all((RECORDS / f"{record}.json").exists() for record in records)


def main() -> None:
    for path in DOCUMENTS:
        text = path.read_text()
        for name in re.findall(r"<!-- ([\w-]+) -->", text):
            if not there(name):
                print(f"{path.relative_to(ROOT)}: no record of {name} yet")
                continue
            block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            text = block.sub(lambda found, name=name: found[1] + render(name) + found[2], text)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())

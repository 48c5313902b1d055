"""What the benchmarks share: paired timings in one run, the conditions they were taken under, and memory as it is."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import transformers

import kvest


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios to the baseline, its quartiles, and the baseline's median in seconds."""

    median: float
    low: float
    high: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratios(
    baseline: Callable[[], object],
    others: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 40,
    budget_s: float = 2.0,
) -> dict[str, Ratio]:
    """Time everything in turn, round after round; the machine's drift hits both sides of a pair alike.

    Each round runs a function often enough to last about a millisecond. `budget_s` bounds the time per function.
    """
    every = {"baseline": baseline, **others}
    inner = {}
    for name, function in every.items():
        function()
        once = min(_once(function, 1) for _ in range(3))
        inner[name] = max(1, int(1e-3 / once))
    longest = max(_once(function, inner[name]) * inner[name] for name, function in every.items())
    rounds = max(5, min(rounds, int(budget_s / longest)))
    times: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, function in every.items():
            times[name].append(_once(function, inner[name]))
    out = {}
    for name in every:
        pairs = sorted(t / b for t, b in zip(times[name], times["baseline"], strict=True))
        q = statistics.quantiles(pairs, n=4)
        out[name] = Ratio(statistics.median(pairs), q[0], q[2], statistics.median(times["baseline"]))
    return out


def _once(function: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count


def conditions() -> dict[str, Any]:
    """Under what a number was measured."""
    here = Path(__file__).parent
    git = subprocess.run(
        ["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvest": kvest.__version__,
        "commit": git.stdout.strip() or "unknown",
    }


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def arguments(description: str, **extra: Any) -> argparse.Namespace:
    """--threads and --json for every benchmark; `extra` adds integers with their defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--json", type=Path, help="write rows and conditions to this file")
    for name, default in extra.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.set_grad_enabled(False)
    return chosen


def finish(rows: list[dict[str, Any]], path: Path | None, **more: Any) -> None:
    """Print the conditions and what `more` there is to them; write the record if asked to."""
    record = {"conditions": {**conditions(), **more}, "rows": rows}
    print("conditions:", ", ".join(f"{key} {value}" for key, value in record["conditions"].items()), flush=True)
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n")


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Bytes by which resident memory rose above its start, at most, while the block ran (sampled from outside).

    Large tensors are returned to the system when they are freed, so resident memory follows what is alive.
    """
    found: list[int] = []
    parent, child = multiprocessing.Pipe()
    stop = multiprocessing.Event()
    sampler = multiprocessing.Process(target=_sample, args=(os.getpid(), child, stop), daemon=True)
    sampler.start()
    parent.recv()
    try:
        yield found
    finally:
        stop.set()
        found.append(parent.recv())
        sampler.join()


def _sample(pid: int, pipe: Any, stop: Event) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:

        def resident() -> int:
            file.seek(0)
            return int(file.read().split()[1]) * page

        start = peak = resident()
        pipe.send("ready")
        while not stop.is_set():
            peak = max(peak, resident())
            time.sleep(0.0002)
    pipe.send(peak - start)

"""Draw docs/figures/importance.png: what each head's budget is worth, and who gets it.

Left: the table that comes with kvest for the embedded default. Right: entries per layer that the allocations of
docs/benchmarks/importance.json gave, mean over its documents.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from kvest.hf.calibration import load, shipped

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "benchmarks" / "importance.json"
FIGURE = ROOT / "docs" / "figures" / "importance.png"
KIND, KEEP = "continuation", 0.25
SHOWN = {
    "uniform": ("every head alike", "0.6", ":"),
    "one_threshold": ("one threshold", "#4c72b0", "-"),
    "one_threshold(importance=calibrated)": ("importance=calibrated", "#dd8452", "-"),
    "one_threshold(importance=damage)": ("importance=damage", "#c44e52", "-"),
}


def main() -> None:
    rows = json.loads(RECORD.read_text())["rows"]
    model = rows[0]["model"]
    damage = load(shipped() / f"{model}-damage.safetensors").importance
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    layers = range(len(damage))
    for head in range(damage.shape[1]):
        left.scatter(layers, damage[:, head].tolist(), s=18, color="#c44e52", alpha=0.75, linewidths=0)
    left.set(yscale="log", xlabel="layer", ylabel="KL per unit of variance (nats)", title="What a head's loss costs")
    for row in rows:
        if (row["kind"], row["keep"], row["part"]) == (KIND, KEEP, "whole table") and row["allocate"] in SHOWN:
            label, colour, style = SHOWN[row["allocate"]]
            mean = [sum(layer) / len(layer) for layer in row["kept_mean"]]
            right.step(layers, mean, where="mid", color=colour, linestyle=style, label=f"{label}: {row['kl_nats']:.3f}")
    right.set(
        xlabel="layer", ylabel="entries kept per head", title=f"Who gets the budget (keep {KEEP})", ylim=(0, None)
    )
    right.legend(frameon=False, title="KL, nats per token", fontsize="small")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=150, metadata={"Software": None})
    print(FIGURE.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())

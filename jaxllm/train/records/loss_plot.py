"""Loss curve of a run as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_loss(rows: Sequence[dict[str, Any]], file: Path, title: str) -> None:
    """Draws training and held-out loss over steps, with the learning rate below, as PNG.

    Args:
        rows: rows of metrics.jsonl: training rows have "nll", evaluation rows "heldout_nll" (nats per token).
        file: the PNG to write; not written without training rows.
        title: above the chart.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [row for row in rows if "nll" in row]
    heldout = [row for row in rows if "heldout_nll" in row]
    if not train:
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    steps, nll = [row["step"] for row in train], [row["nll"] for row in train]
    top.plot(steps, nll, color="#9db4d0", linewidth=0.8, label="training batch")
    top.plot(steps, smoothed(nll), color="#1f4e8c", linewidth=1.8, label="training, smoothed")
    if heldout:
        xs, ys = [row["step"] for row in heldout], [row["heldout_nll"] for row in heldout]
        top.plot(xs, ys, "o-", color="#c4501b", markersize=5, label="held out")
        bits = heldout[-1].get("heldout_bits_per_byte")
        if bits is not None:
            top.annotate(
                f"{bits:.3f} bits per byte",
                (xs[-1], ys[-1]),
                xytext=(-8, 14),
                textcoords="offset points",
                ha="right",
                color="#c4501b",
            )
    top.set_ylabel("loss (nats per token)")
    # The loss of the first steps, near log(vocabulary size), would flatten the rest of the curve.
    low, high = min(nll), sorted(nll)[int(0.98 * (len(nll) - 1))]
    top.set_ylim(low - 0.05 * (high - low) - 0.05, high + 0.1 * (high - low) + 0.05)
    top.set_title(title)
    top.legend(frameon=False)
    bottom.plot(steps, [row["learning_rate"] for row in train], color="#555555")
    bottom.set_ylabel("learning rate")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(file)


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average with bias correction."""
    out, mean = [], 0.0
    for i, value in enumerate(values):
        mean = weight * mean + (1 - weight) * value
        out.append(mean / (1 - weight ** (i + 1)))
    return out

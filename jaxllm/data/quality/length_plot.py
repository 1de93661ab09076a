"""Plot of document lengths and of how full the packed rows are."""

from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxllm.data.quality.corpus_stats import length_stats
from jaxllm.data.sequence_packing import PackingPlan


def plot_lengths(lengths: Int[np.ndarray, " documents"], plans: dict[str, PackingPlan], file: Path, title: str) -> None:
    """Writes a PNG: a histogram of lengths in tokens with percentiles, and the share of filled positions by packing.

    plans: name -> packing plan; one bar each.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = length_stats(lengths)
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, height_ratios=[4, 0.5 + 0.5 * len(plans)])
    low, high = max(1, known.least), max(known.most, known.least + 1, 2)
    edges = np.geomspace(low, high + 1, 49)
    top.hist(np.maximum(lengths, 1), bins=edges.tolist(), color="#9db4d0")
    top.set_xscale("log")
    tallest = top.get_ylim()[1]
    for name, value, height in (("p50", known.p50, 1.0), ("p90", known.p90, 0.9), ("p99", known.p99, 0.8)):
        top.axvline(value, color="#1f4e8c", linewidth=1.2)
        top.annotate(
            f"{name} {value:,}", (value, tallest * height * 0.96), xytext=(4, 0), textcoords="offset points", va="top"
        )
    seq_len = next(iter(plans.values())).seq_len
    top.axvline(seq_len, color="#c4501b", linestyle="--", linewidth=1.2)
    top.annotate(f"row {seq_len:,}", (seq_len, tallest * 0.5), xytext=(4, 0), textcoords="offset points",
                 color="#c4501b")  # fmt: skip
    top.set_xlabel("tokens in a document")
    top.set_ylabel("documents")
    top.set_title(f"{title}: {known.count:,} documents, {known.total:,} tokens")
    names = list(plans)[::-1]
    full = [100 * (1 - plans[name].padding) for name in names]
    bottom.barh(names, full, color="#1f4e8c", height=0.6)
    for place, (name, share) in enumerate(zip(names, full, strict=True)):
        inside = share > 40
        bottom.annotate(
            f"{share:.2f}% full, {plans[name].rows:,} rows", (share, place), xytext=(-6 if inside else 6, 0),
            textcoords="offset points", va="center", ha="right" if inside else "left",
            color="white" if inside else "black",
        )  # fmt: skip
    bottom.set_xlim(0, 100)
    bottom.set_xlabel(f"share of positions in rows of {seq_len:,} that have a token, %")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(file)

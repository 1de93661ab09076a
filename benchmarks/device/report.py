"""Tables of the device kit's figures, for the terminal and for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.interleaved import markdown
from jaxllm.tune import kernel_tuning
from jaxllm.tune.kernel_tuning import TunedCase
from pallas_kernels._dispatch import ONLY_BY_NAME
from pallas_kernels._self_check import DTYPES
from sharding.topology import GIB

PAGE = Path(__file__).resolve().parents[2] / "docs/performance.md"
BEGIN, END = "<!-- device: generated -->", "<!-- end -->"


def tables(kept: Mapping[str, Any]) -> str:
    """All figures as Markdown tables, and what failed."""
    slices, about = kept["slices"], kept["about"]
    found = {name: one["result"] for name, one in slices.items() if "result" in one}
    parts = [f"{about['device']}, jax {about['jax']}, Python {about['python'].split()[0]}."]
    parts += [table for table in (_verdicts(found), _tuning(found), _kernels(found)) if table]
    parts += [table for table in (_training(found), _decoding(found), _offload(found)) if table]
    if failed := [f"- {name}: {one['failed']}" for name, one in slices.items() if "failed" in one]:
        parts.append("Not measured:\n\n" + "\n".join(failed))
    return "\n\n".join(parts)


def write(kept: Mapping[str, Any], page: Path = PAGE) -> None:
    """Writes the tables between the markers of the page, and stores the tuned blocks."""
    text = page.read_text()
    if BEGIN not in text:
        raise ValueError(f"{page} has no line {BEGIN}: add it, and {END} below it, where the tables belong.")
    head, rest = text.split(BEGIN, 1)
    page.write_text(f"{head}{BEGIN}\n{tables(kept)}\n{END}{rest.split(END, 1)[1]}")
    for one in kept["slices"].values():
        if one["part"] == "tuning" and (result := one.get("result", {})).get("blocks"):
            found = TunedCase(result["operation"], result["case"], result["blocks"], None, None, 0, 0, "s")
            kernel_tuning.store(result["kind"], "python -m benchmarks.device", [found], kept["about"]["jax"])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown([head, *rows]) if rows else ""


def _of(found: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    return ((name.removeprefix(prefix).strip(), result) for name, result in found.items() if name.startswith(prefix))


def _verdicts(found: Mapping[str, Any]) -> str:
    rows = []
    for _, one in _of(found, "verdict "):
        by_name = one["implementation"] in ONLY_BY_NAME
        passed = "agrees, used by name" if by_name else "chosen"
        failed = "not chosen" if not by_name else "differs" if one["errors"] else "not compared"
        verdict = passed if one["passed"] else f"{failed}: {one['why']}"
        errors = (f"{one['errors'][dtype]:.1e}" if dtype in one["errors"] else "" for dtype in DTYPES)
        rows.append((one["operation"], one["implementation"], verdict, *errors))
    return _table(("operation", "kernel", "verdict", *DTYPES), rows)


def _tuning(found: Mapping[str, Any]) -> str:
    rows = [
        (
            one["case"],
            ", ".join(f"{name} {value}" for name, value in one["blocks"].items()) or "the defaults",
            "not kept" if one.get("before") is None else f"{one['before'] * 1e3:.3f} -> {one['after'] * 1e3:.3f}",
        )
        for _, one in _of(found, "tuning ")
        if "case" in one
    ]
    return _table(("flash attention", "fastest blocks", "both passes, ms"), rows)


def _kernels(found: Mapping[str, Any]) -> str:
    rows = []
    for name, one in found.items():
        for row in one.get("rows", ()):
            cells = [f"{row[f'{part}_seconds'] * 1e3:.3f} ({row[f'{part}_roofline']:.0%})"
                     if f"{part}_seconds" in row else "" for part in ("forward", "backward")]  # fmt: skip
            rows.append((name, row["contender"], *cells, row.get("failed", f"{row.get('error', 0):.1e}")))
    return _table(("shape", "kernel", "forward, ms (roofline)", "backward, ms (roofline)", "error"), rows)


def _training(found: Mapping[str, Any]) -> str:
    rows = []
    for name, one in _of(found, "training "):
        row, predicted, layers = one["row"], one["predicted"], one["setting"]["layers"]
        rows.append(
            (
                f"{name}, {layers} layers",
                f"{row['step_seconds']:.4f}",
                f"{predicted['seconds']:.4f}" if predicted else "",
                f"{row['mfu']:.1%}",
                f"{row['peak_bytes'] / GIB:.1f}",
                f"{predicted['bytes'] / GIB:.1f}" if predicted else "",
            )
        )
    return _table(("step", "s", "predicted", "MFU", "peak GiB", "predicted"), rows)


def _decoding(found: Mapping[str, Any]) -> str:
    rows = [
        (name, f"{one['tokens_per_second']:,.0f}", f"{one['roofline']:.0%}", f"{one['ready']:.1f}")
        for name, one in _of(found, "decoding ")
    ]
    return _table(("decoding", "tokens/s", "roofline", "ready, s"), rows)


def _offload(found: Mapping[str, Any]) -> str:
    """Share of the copies that is hidden: one less the time that offload adds to keeping the same values."""
    steps = dict(_of(found, "offload, remat "))
    if not {"elementwise", "offload"} <= steps.keys() or not steps["offload"]["predicted"]:
        return ""
    seconds = {name: one["row"]["step_seconds"] for name, one in steps.items()}
    copies = steps["offload"]["predicted"]["copies"]
    hidden = 1 - max(0.0, seconds["offload"] - seconds["elementwise"]) / copies
    rows = [(name, f"{took:.4f}", f"{steps[name]['row']['peak_bytes'] / GIB:.1f}") for name, took in seconds.items()]
    table = _table(("remat", "s", "peak GiB"), rows)
    return f"{table}\n\nOf {copies:.4f} s of copies to the host and back, {hidden:.0%} are hidden."

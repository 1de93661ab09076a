"""Sharding table as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxllm.parallel.sharding_table import ShardingRow, ShardingTable, device_bytes


def text(table: ShardingTable) -> str:
    """Sharding table as text: parameters, totals, and expected collectives where they are known."""
    mesh = ", ".join(f"{name}={n}" for name, n in table.mesh.items())
    parts = [f"{table.parameter_count:,} parameters on {math.prod(table.mesh.values())} devices ({mesh})"]
    rows = [(r.name, " x ".join(map(str, r.shape)), r.dtype, r.place, size(r.device_bytes)) for r in table.parameters]
    parts.append(columns(("parameter", "shape", "dtype", "sharding", "per device"), rows, "<><<>"))
    groups = (("parameters", table.parameters), ("optimizer state", table.optimizer))
    totals = [
        (name, size(sum(row.bytes for row in group)), size(device_bytes(group)), size(_whole(group)))
        for name, group in groups
    ]
    parts.append(columns(("", "total", "per device", "replicated"), totals, "<>>>"))
    if table.collectives:
        sent = [(c.kind, ",".join(c.axes), str(c.count), size(c.bytes), c.why) for c in table.collectives]
        parts.append(columns(("collectives of a step", "mesh axes", "count", "bytes each", "for"), sent, "<<>><"))
    if table.remark:
        parts.append(table.remark)
    return "\n\n".join(parts)


def size(number: float) -> str:
    """Bytes as text, such as ``1.50 GiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = min(len(units) - 1, int(math.log2(number) // 10)) if number >= 1 else 0
    return f"{number / 2 ** (10 * power):.{2 if power else 0}f} {units[power]}"


def _whole(rows: Sequence[ShardingRow]) -> int:
    """Bytes of the arrays that are replicated on every device."""
    return sum(row.bytes for row in rows if row.bytes == row.device_bytes)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> str:
    """Text table with aligned columns; ``sides`` has "<" (left) or ">" (right) for each column."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines)

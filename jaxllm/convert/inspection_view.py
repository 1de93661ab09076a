"""Inspection view: tables on a terminal, plain columns elsewhere."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxllm.convert.inspection import Inspection, group_layers, mebibytes
from jaxllm.models import BlockConfig
from jaxllm.models.layers.layer import unusual

TEMPLATE_LINES = 4
WIDE = 2000
"""Console width if there is no terminal: nothing is folded."""
RUNTIME = ("embed_grad", "param_dtype", "dtype", "matmul_precision", "remat", "unroll")


def show(found: Inspection, *, every: bool = False, console: Console | None = None) -> None:
    """Prints an inspection.

    Args:
        every: print every tensor, and whole templates; otherwise tensors that differ only in the layer are one row.
        console: console to print to; standard output by default.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = WIDE
    rows = [("files", f"{found.path} ({found.format})"), *architecture_rows(found), *tokenizer_rows(found, every)]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in rows:
        table.add_row(f"[bold]{what}[/]", escape(value))
    console.print(table)
    if found.tensors:
        console.print()
        console.print(tensor_table(found, every, console))
    for title, sentences in (("loading", found.loading), ("findings", found.findings)):
        if sentences:
            console.print(f"\n[bold]{title}[/]")
            for sentence in sentences:
                console.print(f"  {escape(sentence)}", style="red" if title == "findings" else None, highlight=False)


def architecture_rows(found: Inspection) -> list[tuple[str, str]]:
    """Rows (name, value) of family, sizes, and settings that are not a default."""
    size = f"{found.parameters:,} parameters, {mebibytes(found.bytes)} in {len(found.tensors)} tensors"
    rows = [("family", found.family or "not known"), ("size", size)]
    if found.config is None:
        return rows
    config = found.config
    rows.append(("layers", f"{config.layers} of width {config.embed_dim}; vocabulary {config.vocab_size:,}"))
    kinds: dict[BlockConfig, list[int]] = {}
    for layer, block in enumerate(config.blocks):
        kinds.setdefault(block, []).append(layer)
    for block, layers in kinds.items():
        which = "" if len(kinds) == 1 else f" {_numbers(layers)}"
        norms = f"; norms = {block.norms}" if block.norms != BlockConfig().norms else ""
        rows += [(f"attention{which}", block.attention.describe() + norms), (f"mlp{which}", block.mlp.describe())]
    if rest := unusual(config, "vocab_size", "embed_dim", "layers", "prefix", "pattern", *RUNTIME):
        rows.append(("besides", rest))
    return rows


def tokenizer_rows(found: Inspection, every: bool) -> list[tuple[str, str]]:
    """Rows (name, value) of tokenizer and chat templates."""
    tokenizer = found.tokenizer
    if tokenizer is None:
        rows = [("tokenizer", "none")]
    else:
        stops = ", ".join(f"{name} ({index})" for index, name in tokenizer["stops"].items()) or "none"
        begins = f"; texts begin with {tokenizer['bos']}" if tokenizer["begins_with_bos"] else ""
        kinds = f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, {tokenizer['specials']} of them special"
        rows = [("tokenizer", f"{kinds}{begins}; generation ends at {stops}")]
    for name, source in found.templates.items():
        lines = source.splitlines() or [""]
        shown = lines if every else [line[:100] for line in lines[:TEMPLATE_LINES]]
        more = [] if len(shown) == len(lines) else [f"... {len(lines) - len(shown)} more lines"]
        rows.append((f"template {name}", "\n".join([*shown, *more])))
    return rows if found.templates else [*rows, ("template", "none")]


def tensor_table(found: Inspection, every: bool, console: Console) -> Table:
    """Table of the tensors and the parameters they become."""
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, padding=(0, 2, 0, 0), show_edge=False)
    for column in ("tensor", "shape", "type", "here"):
        table.add_column(column, overflow="fold", no_wrap=not console.is_terminal)
    rows = [(tensor, 1) for tensor in found.tensors] if every else group_layers(found.tensors)
    if not every:
        table.add_column("number", justify="right")
    for tensor, count in rows:
        cells = [escape(tensor.name), " x ".join(map(str, tensor.shape)), tensor.kind, escape(tensor.ours)]
        table.add_row(*cells, *([] if every else [str(count)]))
    return table


def _numbers(layers: list[int]) -> str:
    """Layer numbers such as (0, 2, 4, ...), shortened."""
    shown = ", ".join(map(str, layers[:6]))
    return f"({shown}{', ...' if len(layers) > 6 else ''})"

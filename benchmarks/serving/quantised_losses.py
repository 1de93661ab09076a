"""Losses of a model in formats and methods, on four texts: one line for each, and a table in Markdown.

    python -m benchmarks.serving.quantised_losses [--model smollm2] [--cells int8:rtn,int4_g64:gptq] [--json FILE]

Calibration text: plays that are not held out, source code and reference text, a third of the rows each. Texts of the
losses: the held-out plays, other source code, another part of the reference (all of Python's library), and pages of
this repository. Matrices stay packed, so that activations are rounded where the format says so.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

CELLS = (
    "int8:rtn,llm_int8:rtn,w8a8:smoothquant,fp8:rtn,int4_g64:rtn,int4_g64:hqq,int4_g64:awq,int4_g64:gptq,nf4:rtn,"
    "lut4:learned_scales,lut4:gptq_learned_scales,int4_g64:gptq_learned_scales,mxfp4:gptq,w4a8_g64:gptq,int3_g64:gptq,lut3:gptq,budget_3.5_g64:gptq"
)
"""FORMAT:METHOD; budget_N_gM is a mean of N bits in groups of M."""


def texts() -> tuple[dict[str, str], list[str]]:
    """(texts of the losses by name, texts of the calibration)."""
    import jaxllm.data.corpus as corpus

    plays = {split: (Path(corpus.__file__).parent / f"{split}.txt").read_text() for split in ("train", "heldout")}
    code = {name: inspect.getsource(importlib.import_module(name)) for name in ("argparse", "typing")}
    topics = list(importlib.import_module("pydoc_data.topics").topics.values())
    pages = sorted((Path(__file__).parents[2] / "docs" / "train").glob("*.md"))
    found = {
        "plays": plays["heldout"],
        "code": code["argparse"],
        "reference": "\n".join(topics[1::2]),
        "pages": "\n".join(page.read_text() for page in pages),
    }
    return found, [plays["train"], code["typing"], "\n".join(topics[0::2])]


class CellLoss(NamedTuple):
    """Losses of a model in one format.

    Attributes:
        cell: FORMAT:METHOD.
        mebibytes: size of its files.
        before, after: loss on each text.
    """

    cell: str
    mebibytes: float
    before: dict[str, float]
    after: dict[str, float]

    @property
    def rises(self) -> dict[str, float]:
        """Relative rise of each loss."""
        return {name: self.after[name] / loss - 1 for name, loss in self.before.items()}


def measure(model: str, cells: Sequence[str], rows: int, per_text: int, length: int) -> Iterator[CellLoss]:
    """Quantises a model in each format and measures its losses.

    Args:
        rows: rows of calibration text.
        per_text: rows of each text of the losses.
        length: tokens of a row.
    """
    from jaxllm.cli.commands.quantise import mean_loss, quantise
    from jaxllm.hub.model_source import find_model, open_source

    path = find_model(model)
    tokenizer = open_source(path).tokenizer
    losses, calibration = texts()
    ids = {name: list(map(int, tokenizer.encode(text[: per_text * length * 16]))) for name, text in losses.items()}
    each = rows // 3 * length
    parts = [tokenizer.encode(text[: each * 16])[:each] for text in calibration]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "calibration.txt"
        text.write_text("".join(tokenizer.decode(part) for part in parts))
        before = {name: mean_loss(path, one, per_text, length) for name, one in ids.items()}
        for number, cell in enumerate(cells):
            form, method = cell.split(":")
            out = Path(folder) / str(number)
            command = [str(path), str(out), "--method", method, "--calibrate", str(text)]
            if form.startswith("budget_"):
                _, budget, group = form.split("_")
                command += ["--format", f"int4_{group}", "--bits-budget", budget]
            else:
                command += ["--format", form]
            quantise([*command, "--rows", str(rows), "--length", str(length)])
            after = {name: mean_loss(out, one, per_text, length, "packed") for name, one in ids.items()}
            yield CellLoss(cell, sum(file.stat().st_size for file in out.glob("*.safetensors")) / 2**20, before, after)


def main() -> int:
    """Quantises, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--rows", type=int, default=12, help="rows of calibration text")
    parser.add_argument("--texts", type=int, default=4, help="rows of each text")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for one in measure(options.model, options.cells.split(","), options.rows, options.texts, options.length):
        found.append(one)
        rises = " | ".join(f"{rise:+.1%}" for rise in one.rises.values())
        print(f"| {one.cell.replace(':', ' | ')} | {one.mebibytes:.0f} | {rises} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([one._asdict() for one in found]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Losses and tasks of a model in formats and methods: a line of a table in Markdown for each.

    python -m benchmarks.serving.quantised_losses [--model smollm2] [--cells int8:rtn,int4_g64:gptq] [--json FILE]
        [--items 24]

Calibration text: plays that are not held out, source code and reference text, a third of the rows each. Texts of the
losses: the held-out plays, other source code, another part of the reference (all of Python's library), and pages of
this repository. Three tasks of multiple choice (``text_tasks``): how reference text and pages go on, and capitals;
shown is the share of rows whose right answer has the largest likelihood per byte. Matrices stay packed, so that
activations are rounded where the format says so.
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
    "int8:rtn,fp8:rtn,w8a8:smoothquant,int4_g64:rtn,int4_g64:hqq,int4_g64:awq,int4_g64:gptq,int4_g64:gptq_act_order,"
    "int4_g64:gptq_learned_scales,nf4:rtn,lut4:rtn,lut4:gptq_learned_scales,mxfp4:gptq,int3_g64:gptq_act_order"
)
"""FORMAT:METHOD; budget_N_gM is a mean of N bits in groups of M."""
PLAIN = "float32"
"""The cell of the model as it is."""


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
    """Losses and tasks of a model in one format.

    Attributes:
        cell: FORMAT:METHOD.
        mebibytes: size of its files.
        before, after: loss on each text.
        tasks: share of right answers, by task.
    """

    cell: str
    mebibytes: float
    before: dict[str, float]
    after: dict[str, float]
    tasks: dict[str, float]

    @property
    def rises(self) -> dict[str, float]:
        """Relative rise of each loss."""
        return {name: self.after[name] / loss - 1 for name, loss in self.before.items()}


def measure(
    model: str, cells: Sequence[str], rows: int, per_text: int, length: int, items: int = 0
) -> Iterator[CellLoss]:
    """Quantises a model in each format and measures its losses and tasks; "float32" is the model as it is.

    Args:
        rows: rows of calibration text.
        per_text: rows of each text of the losses.
        length: tokens of a row.
        items: rows of each task; 0: no tasks.
    """
    from benchmarks.serving.forward_scorer import ForwardScorer
    from benchmarks.serving.text_tasks import write_tasks
    from jaxllm.cli.commands.quantise import quantise
    from jaxllm.evals import run_task
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
        asked = {name: losses[name] for name in ("reference", "pages")}
        tasks = write_tasks(Path(folder), asked, items) if items else []

        def scored(cell: str, source: Path, size: float, weights: str, before: dict[str, float]) -> CellLoss:
            scorer = ForwardScorer(source, weights)
            after = {name: scorer.mean_loss(one, per_text, length) for name, one in ids.items()}
            right = {file.stem: run_task(scorer, file).metrics["acc_norm"] for file in tasks}
            return CellLoss(cell, size, before or after, after, right)

        plain = scored(PLAIN, path, 0.0, "plain", {})
        for number, cell in enumerate(cells):
            if cell == PLAIN:
                yield plain
                continue
            form, method = cell.split(":")
            out = Path(folder) / str(number)
            command = [str(path), str(out), "--method", method, "--calibrate", str(text)]
            if form.startswith("budget_"):
                _, budget, group = form.split("_")
                command += ["--format", f"int4_{group}", "--bits-budget", budget]
            else:
                command += ["--format", form]
            quantise([*command, "--rows", str(rows), "--length", str(length)])
            size = sum(file.stat().st_size for file in out.glob("*.safetensors")) / 2**20
            yield scored(cell, out, size, "packed", plain.after)


def main() -> int:
    """Quantises, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--rows", type=int, default=12, help="rows of calibration text")
    parser.add_argument("--texts", type=int, default=4, help="rows of each text")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--items", type=int, default=24, help="rows of each task; 0: no tasks")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    cells = [PLAIN] * (options.items > 0) + options.cells.split(",")
    for one in measure(options.model, cells, options.rows, options.texts, options.length, options.items):
        found.append(one)
        rises = " | ".join(f"{rise:+.1%}" for rise in one.rises.values())
        right = "".join(f" {share:.0%} |" for share in one.tasks.values())
        print(f"| {one.cell.replace(':', ' | ')} | {one.mebibytes:.0f} | {rises} |{right}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([one._asdict() for one in found]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

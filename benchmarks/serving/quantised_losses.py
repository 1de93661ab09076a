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
from pathlib import Path

CELLS = (
    "int8:rtn,llm_int8:rtn,w8a8:smoothquant,fp8:rtn,int4_g64:rtn,int4_g64:hqq,int4_g64:awq,int4_g64:gptq,nf4:rtn,"
    "lut4:learned_scales,mxfp4:gptq,w4a8_g64:gptq,int3_g64:gptq,lut3:gptq,budget_3.5_g64:gptq"
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


def main() -> int:
    """Quantises, measures and prints."""
    from jaxllm.cli.commands.quantise import mean_loss, quantise
    from jaxllm.hub.model_source import find_model, open_source

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--rows", type=int, default=12, help="rows of calibration text")
    parser.add_argument("--texts", type=int, default=4, help="rows of each text")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = find_model(options.model)
    tokenizer = open_source(path).tokenizer
    losses, calibration = texts()
    ids = {
        name: list(map(int, tokenizer.encode(text[: options.texts * options.length * 16])))
        for name, text in losses.items()
    }
    each = options.rows // 3 * options.length
    parts = [tokenizer.encode(text[: each * 16])[:each] for text in calibration]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "calibration.txt"
        text.write_text("".join(tokenizer.decode(part) for part in parts))
        before = {name: mean_loss(path, one, options.texts, options.length) for name, one in ids.items()}
        print("before", " ".join(f"{name} {loss:.4f}" for name, loss in before.items()), flush=True)
        for cell in options.cells.split(","):
            form, method = cell.split(":")
            out = Path(folder) / form.replace(".", "_") / method
            command = [str(path), str(out), "--method", method, "--calibrate", str(text)]
            if form.startswith("budget_"):
                _, budget, group = form.split("_")
                command += ["--format", f"int4_{group}", "--bits-budget", budget]
            else:
                command += ["--format", form]
            out.parent.mkdir(parents=True, exist_ok=True)
            quantise([*command, "--rows", str(options.rows), "--length", str(options.length)])
            after = {name: mean_loss(out, one, options.texts, options.length, "packed") for name, one in ids.items()}
            size = sum(file.stat().st_size for file in out.glob("*.safetensors")) / 2**20
            rises = {name: after[name] / before[name] - 1 for name in ids}
            rows.append({"format": form, "method": method, "mebibytes": size, "rises": rises})
            print(
                f"| {form} | {method} | {size:.0f} |", " ".join(f"{rise:+.1%} |" for rise in rises.values()), flush=True
            )
    if options.json:
        options.json.write_text(json.dumps({"before": before, "cells": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

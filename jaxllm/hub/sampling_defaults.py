"""Sampling defaults of a model: what its authors recommend, in ``generation_config.json`` or in a GGUF file's metadata.

They hold where a request or a command gives no value. ``generation_config.json`` is read as vLLM's
``--generation-config auto`` reads it: whether the file says ``do_sample`` or not, and without its lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxllm.files import DataError, at
from jaxllm.text.tokenizer_files import GENERATION_FILE, read_object

SamplingDefaults = Mapping[str, float]
"""Fields of ``jaxllm.infer.SamplingParams`` and their values."""
_LEGAL: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: 0 <= x < math.inf, "0 (greedy decoding) or a positive number"),
    "top_p": (lambda x: 0 < x <= 1, "a number above 0 and up to 1"),
    "top_k": (lambda x: x >= -1 and x == int(x), "a number of tokens, or 0 or -1 for all"),
    "min_p": (lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "typical_p": (lambda x: 0 < x <= 1, "a number above 0 and up to 1"),
    "repetition_penalty": (lambda x: 0 < x < math.inf, "a positive number"),
}
_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Keys of llama.cpp's files and the fields they mean."""
SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}
"""Sampling that SmolLM2's authors use in the model card of SmolLM2-135M-Instruct; neither its repository nor the
packaged file has it in machine-readable form. https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
"""


def sampling_defaults_of(folder: Path) -> SamplingDefaults:
    """Sampling defaults of a folder's ``generation_config.json``; empty where there is none.

    Raises:
        DataError: a value is not legal; names it.
    """
    file = folder / GENERATION_FILE
    return _checked(read_object(file), str(at(file))) if file.is_file() else {}


def sampling_defaults_of_gguf(metadata: Mapping[str, Any], where: str) -> SamplingDefaults:
    """Sampling defaults of a GGUF file's metadata; empty where it has none.

    Raises:
        DataError: a value is not legal; names it.
    """
    return _checked({field: metadata[key] for key, field in _GGUF_KEYS.items() if key in metadata}, where)


def _checked(given: Mapping[str, Any], where: str) -> SamplingDefaults:
    found: dict[str, float] = {}
    for name, (holds, legal) in _LEGAL.items():
        if (value := given.get(name)) is None:
            continue
        value = value.item() if hasattr(value, "item") else value  # GGUF's are numbers of numpy
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or math.isnan(value) or not holds(value):
            raise DataError(f"{where}: {name} is {value!r}; legal: {legal}. --generation-config none ignores the file.")
        # float32 of GGUF: 0.95 and not 0.949999988.
        found[name] = max(0, int(value)) if name == "top_k" else float(f"{value:.6g}")
    return found

"""Text to batches: sources, tokenizers, packing, a shuffle without state, prefetch.

    from jaxllm import data

    dataset = data.load_dataset(data.DataConfig(source="shakespeare", tokenizer="bpe:2048", seq_len=256, batch_size=16))
    batch = dataset.train.batch_at(step)  # Batch(tokens, targets, segment_ids, positions), int32 [16, 256]

Names are imported when they are first used, so importing this package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.data.baseline import BigramBaseline, bigram_baseline, bigram_baseline_of
    from jaxllm.data.batch import Batch
    from jaxllm.data.config import DataConfig, SourceConfig
    from jaxllm.data.dataset import CursorMismatch, HeldoutDataset, TokenDataset
    from jaxllm.data.loader import Dataset, load_dataset
    from jaxllm.data.mixture import MixtureDataset
    from jaxllm.data.preferences import PreferenceBatch, PreferenceDataset, load_preferences
    from jaxllm.data.prefetch import Prefetcher
    from jaxllm.data.tokens import open_tokens, write_tokens
    from jaxllm.files import DataError
    from jaxllm.text import ByteTokenizer, StreamDecoder, Tokenizer, load_tokenizer

# Tokenizers live in jaxllm.text; they are named here too, since every data set has one.
_HOMES = {
    "jaxllm.files": ("DataError",),
    "jaxllm.text": (
        "ByteTokenizer",
        "StreamDecoder",
        "Tokenizer",
        "load_tokenizer",
    ),
    "jaxllm.data.baseline": (
        "BigramBaseline",
        "bigram_baseline",
        "bigram_baseline_of",
    ),
    "jaxllm.data.batch": ("Batch",),
    "jaxllm.data.config": (
        "DataConfig",
        "SourceConfig",
    ),
    "jaxllm.data.dataset": (
        "CursorMismatch",
        "HeldoutDataset",
        "TokenDataset",
    ),
    "jaxllm.data.loader": (
        "Dataset",
        "load_dataset",
    ),
    "jaxllm.data.mixture": ("MixtureDataset",),
    "jaxllm.data.preferences": (
        "PreferenceBatch",
        "PreferenceDataset",
        "load_preferences",
    ),
    "jaxllm.data.prefetch": ("Prefetcher",),
    "jaxllm.data.tokens": (
        "open_tokens",
        "write_tokens",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Batch",
    "BigramBaseline",
    "ByteTokenizer",
    "CursorMismatch",
    "DataConfig",
    "DataError",
    "Dataset",
    "HeldoutDataset",
    "MixtureDataset",
    "PreferenceBatch",
    "PreferenceDataset",
    "Prefetcher",
    "SourceConfig",
    "StreamDecoder",
    "TokenDataset",
    "Tokenizer",
    "bigram_baseline",
    "bigram_baseline_of",
    "load_dataset",
    "load_preferences",
    "load_tokenizer",
    "open_tokens",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__

"""Data pipeline: sources, tokenizer cache, sequence packing, stateless shuffle, data mixture, prefetch.

    from jaxllm import data

    dataset = data.load_dataset(data.DataConfig(source="shakespeare", tokenizer="bpe:2048", seq_len=256, batch_size=16))
    batch = dataset.train.batch_at(step)  # Batch(tokens, targets, segment_ids, positions), int32 [16, 256]

Names are imported when they are first used, so importing this package costs nothing.
"""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.data.batch import Batch
    from jaxllm.data.config import DataConfig, SourceConfig
    from jaxllm.data.data_source import DataSource
    from jaxllm.data.dataset import CursorMismatch, HeldoutDataset, TokenDataset
    from jaxllm.data.loader import Dataset, load_dataset
    from jaxllm.data.mixture import MixtureDataset
    from jaxllm.data.preferences import PreferenceBatch, PreferenceDataset, load_preferences
    from jaxllm.data.prefetch import Prefetcher
    from jaxllm.data.quality.bigram_baseline import BigramBaseline, bigram_baseline, bigram_baseline_of
    from jaxllm.data.token_files import open_tokens, write_tokens
    from jaxllm.files import DataError
    from jaxllm.text import ByteTokenizer, StreamDecoder, Tokenizer, load_tokenizer

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.data.batch": ("Batch",),
        "jaxllm.data.config": (
            "DataConfig",
            "SourceConfig",
        ),
        "jaxllm.data.data_source": ("DataSource",),
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
        "jaxllm.data.quality.bigram_baseline": (
            "BigramBaseline",
            "bigram_baseline",
            "bigram_baseline_of",
        ),
        "jaxllm.data.token_files": (
            "open_tokens",
            "write_tokens",
        ),
        "jaxllm.files": ("DataError",),
        "jaxllm.text": (
            "ByteTokenizer",
            "StreamDecoder",
            "Tokenizer",
            "load_tokenizer",
        ),
    },
)

__all__ = [
    "Batch",
    "BigramBaseline",
    "ByteTokenizer",
    "CursorMismatch",
    "DataConfig",
    "DataError",
    "DataSource",
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

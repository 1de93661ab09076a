"""Strict reading of a ``config.json``: a field is read, known not to matter, or an error; nothing is guessed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxllm.config import closest
from jaxllm.hub.errors import HubError

IGNORED_FIELDS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "_num_labels",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "max_sequence_length",
        "min_length",
        "model_type",
        "n_ctx",
        "n_special",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_scores",
        "pad_token_id",
        "predict_special_tokens",
        "prefix",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)
"""Fields that do not affect the forward pass; an export carries them over.

Dropout matters in training alone; sampling defaults, and outputs beside the logits, do not belong to the model.
"""

MAX_INTEGER = 2**40
"""Largest integer that is accepted as a size."""


class FieldReader:
    """Fields of a ``config.json``; remembers which were read."""

    def __init__(self, given: Mapping[str, Any], where: str = "config.json"):
        self.given, self.where = given, where
        self._read = set(IGNORED_FIELDS)

    def need(self, name: str, kind: Any) -> Any:
        """A required field.

        Raises:
            HubError: it is missing, or of another type.
        """
        if self.given.get(name) is None:
            raise HubError(f"{self.where} lacks {name!r}.{closest(name, self.given)}")
        return self.get(name, kind, None)

    def get(self, name: str, kind: Any, default: Any, *, least: int = 1) -> Any:
        """A field, or ``default`` if it is missing or null.

        Args:
            least: smallest legal value of an integer; integers are sizes and counts.

        Raises:
            HubError: it has another type; a bool is not a number, an integer is a float, a float is finite.
        """
        self._read.add(name)
        value = self.given.get(name)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER:
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise HubError(f"{self.where}: {name} = {value!r} is not of the kind {getattr(kind, '__name__', kind)}.")
        if kind is int and not least <= value <= MAX_INTEGER:
            raise HubError(f"{self.where}: {name} = {value}; legal: {least} to {MAX_INTEGER}.")
        if kind is float and not math.isfinite(value):
            raise HubError(f"{self.where}: {name} = {value}; legal: finite numbers.")
        return value

    def given_or(self, name: str, kind: Any, missing: Any) -> Any:
        """A field; ``missing`` if it is absent, None if it is null: two different things in transformers."""
        return self.get(name, kind, None if name in self.given else missing)

    def only(self, name: str, *legal: Any) -> None:
        """Checks a field that is supported at these values only.

        Raises:
            HubError: it is present with another value.
        """
        self._read.add(name)
        if name in self.given and self.given[name] not in legal:
            values = " or ".join(map(repr, legal))
            raise HubError(f"{self.where}: {name} = {self.given[name]!r} is not supported; legal: {values}.")

    def skip(self, *names: str) -> None:
        """Marks fields that this family ignores, or uses only in cases that do not arise here."""
        self._read.update(names)

    def finish(self) -> None:
        """Refuses every field that was not read.

        Raises:
            HubError: names the field.
        """
        for name, value in self.given.items():
            if name not in self._read:
                raise HubError(
                    f"{self.where} has the field {name!r} = {value!r}, which is not understood. If it does not "
                    "change the forward pass, remove it; otherwise this model cannot be loaded yet."
                )

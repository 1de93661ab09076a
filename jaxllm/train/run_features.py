"""Features of a run: the settings that a row of ``jaxllm.train.combinations`` can name, and whether a run has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, get_args

import jax

from jaxllm.models import BlockConfig, functional
from jaxllm.models.param_subset import trainable_mask
from jaxllm.models.remat import saves_names_alone
from jaxllm.parallel.pipeline.stage_split import Remat
from jaxllm.train.config import RunConfig
from jaxllm.train.step.objective import HeadObjective, make_objective
from jaxllm.train.unequal.unequal_gradients import uneven_axes

Sizes = Mapping[str, int]
"""Sizes of the mesh axes."""


class Feature(NamedTuple):
    """Setting of a run.

    Attributes:
        on: whether a run on a mesh has it.
        says: how the run says it, with its values.
    """

    on: Callable[[RunConfig, Sizes], bool]
    says: Callable[[RunConfig], str]


class Refusal(NamedTuple):
    """Row of the table: two features that do not go together, why, and what to do instead.

    Attributes:
        one, other: names of the features.
        why, instead: for the message.
        platform: the row is for devices of this platform, such as "cpu"; empty: for all.
    """

    one: str
    other: str
    why: str
    instead: str
    platform: str = ""


IN_DEVICE_MEMORY = "leave the optimizer state in device memory (without host.optimizer and disk.directory)"
NO_STAGES = "leave stage out of the mesh"
WHOLE = "the optimizer never holds all gradients"


def _folding(run: RunConfig) -> str:
    return f'parallel.experts = "{run.parallel.experts}"'


def _folds_rows(run: RunConfig, sizes: Sizes) -> bool:
    if (folding := run.parallel.folding()) is None:
        return False
    table = folding.table(sizes)
    return not {"data", "fsdp"}.isdisjoint((*table["experts"], *table["expert_mlp"]))


def _optimizer(run: RunConfig) -> str:
    return f'optim.kind = "{run.optim.kind}"'


def _objective(run: RunConfig) -> str:
    return f'objective.name = "{run.objective.name}"'


def _own_forward(run: RunConfig) -> bool:
    return not isinstance(make_objective(run.objective, run.z_loss), HeadObjective)


def _per_token(run: RunConfig) -> bool:
    objective = make_objective(run.objective, run.z_loss)
    return isinstance(objective, HeadObjective) and objective.per_token


def _frozen(run: RunConfig) -> list[str]:
    model = functional(run.model)
    mask = trainable_mask(model, run.trainable)
    return [jax.tree_util.keystr(path, simple=True) for path, on in jax.tree.leaves_with_path(mask) if not on]


def _block_kinds(run: RunConfig) -> tuple[BlockConfig, ...]:
    return (*run.model.prefix, *run.model.pattern)


def _spikes(run: RunConfig) -> str:
    return f'spikes.action = "{run.spikes.action}"'


def _remat(run: RunConfig) -> str:
    return f'model.remat = "{run.model.remat}"'


def _outer(run: RunConfig) -> str:
    return f'outer.kind = "{run.outer.kind}"'


def _compress(run: RunConfig) -> str:
    return f'grads.compress = "{run.grads.compress}"'


def _zero(run: RunConfig) -> str:
    return (
        f'parallel.zero = "{run.parallel.zero}"'
        if run.parallel.zero == "3level"
        else f"parallel.zero = {run.parallel.zero}"
    )


def _state_shares(run: RunConfig) -> str:
    return f"parallel.state_shares = {' '.join(map(str, run.parallel.state_shares))}"


def _offloaded_optimizer(run: RunConfig) -> str:
    return f'disk.directory = "{run.disk.directory}"' if run.disk.directory else "host.optimizer"


def _precision(run: RunConfig) -> str:
    return f'model.matmul_precision = "{run.model.matmul_precision}"'


def _rounding(run: RunConfig) -> str:
    return f'optim.rounding = "{run.optim.rounding}"'


FEATURES: dict[str, Feature] = {
    # Parallelism
    "pipeline": Feature(lambda run, sizes: sizes.get("stage", 1) > 1, lambda run: f"the mesh {run.mesh!r} with stages"),
    "no pipeline": Feature(lambda run, sizes: sizes.get("stage", 1) == 1, lambda run: f"the mesh {run.mesh!r}"),
    "virtual stages": Feature(
        lambda run, _: run.parallel.chunks > 0, lambda run: f"parallel.chunks = {run.parallel.chunks}"
    ),
    "depths of stages": Feature(
        lambda run, _: bool(run.parallel.depths), lambda run: f"parallel.depths = {run.parallel.depths}"
    ),
    "pipeline offload": Feature(
        lambda run, _: run.parallel.offload > 0, lambda run: f"parallel.offload = {run.parallel.offload}"
    ),
    "ZeRO 1 or 2": Feature(lambda run, _: run.parallel.zero in (1, 2), _zero),
    "3-level ZeRO": Feature(lambda run, _: run.parallel.zero == "3level", _zero),
    "2D tensor parallelism": Feature(
        lambda run, sizes: run.parallel.tensor != "1d" or sizes.get("features", 1) > 1,
        lambda run: (
            f"the mesh {run.mesh!r}" if run.parallel.tensor == "1d" else f'parallel.tensor = "{run.parallel.tensor}"'
        ),
    ),
    "layouts by layer": Feature(
        lambda run, _: bool(run.parallel.layouts()), lambda run: f'parallel.layers = "{run.parallel.layers}"'
    ),
    "no tensor parallelism": Feature(
        lambda run, sizes: sizes.get("tensor", 1) == 1, lambda run: f"the mesh {run.mesh!r} without tensor"
    ),
    "int8 gathers": Feature(
        lambda run, _: run.parallel.gather == "int8", lambda run: f'parallel.gather = "{run.parallel.gather}"'
    ),
    "one level": Feature(
        lambda run, sizes: sizes.get("data", 1) == sizes.get("local", 1) == 1, lambda run: f"the mesh {run.mesh!r}"
    ),
    "ring matmuls": Feature(
        lambda run, sizes: run.parallel.overlap == "ring" and sizes.get("tensor", 1) > 1,
        lambda run: 'parallel.overlap = "ring"',
    ),
    "rings": Feature(
        lambda run, sizes: (
            (run.parallel.context in ("ring", "by_need") and sizes.get("context", 1) > 1)
            or (run.parallel.overlap == "ring" and sizes.get("tensor", 1) > 1)
        ),
        lambda run: f'parallel.context = "{run.parallel.context}" with parallel.overlap = "{run.parallel.overlap}"',
    ),
    "context parallelism": Feature(
        lambda run, sizes: sizes.get("context", 1) > 1, lambda run: f"the mesh {run.mesh!r} with context"
    ),
    "no context parallelism": Feature(
        lambda run, sizes: sizes.get("context", 1) == 1, lambda run: f"the mesh {run.mesh!r} without context"
    ),
    "context by need": Feature(
        lambda run, _: run.parallel.context == "by_need", lambda run: f'parallel.context = "{run.parallel.context}"'
    ),
    "slots by number of tokens": Feature(
        lambda run, _: run.parallel.slot > 0, lambda run: f"parallel.slot = {run.parallel.slot}"
    ),
    "tokens out of order": Feature(
        lambda run, sizes: run.parallel.layout != "contiguous" and sizes.get("context", 1) > 1,
        lambda run: f'parallel.layout = "{run.parallel.layout}"',
    ),
    "uneven rows": Feature(
        lambda run, _: bool(run.parallel.micro_batches),
        lambda run: f"parallel.micro_batches = {' '.join(map(str, run.parallel.micro_batches))}",
    ),
    "numbers of other devices": Feature(
        lambda run, sizes: (
            bool(run.parallel.micro_batches) and not uneven_axes(run.parallel.micro_batches, run.parallel.zero, sizes)
        ),
        lambda run: f"the mesh {run.mesh!r} with {_zero(run)}",
    ),
    "uneven optimizer state": Feature(lambda run, _: bool(run.parallel.state_shares), _state_shares),
    "shares of other devices": Feature(
        lambda run, sizes: (
            bool(run.parallel.state_shares) and not uneven_axes(run.parallel.state_shares, run.parallel.zero, sizes)
        ),
        lambda run: f"the mesh {run.mesh!r} with {_zero(run)}",
    ),
    "replicas": Feature(
        lambda run, sizes: sizes.get("replica", 1) > 1, lambda run: f"the mesh {run.mesh!r} with replicas"
    ),
    "no replicas": Feature(lambda run, sizes: "replica" not in sizes, lambda run: f"the mesh {run.mesh!r}"),
    "outer step": Feature(lambda run, _: run.outer.kind != "none", _outer),
    "slow replicas": Feature(lambda run, _: bool(run.outer.slow), lambda run: f"outer.slow = {run.outer.slow}"),
    "no outer step": Feature(lambda run, _: run.outer.kind == "none", _outer),
    "device order": Feature(lambda run, _: bool(run.device_order), lambda run: f"device_order = {run.device_order}"),
    "two-level sums": Feature(
        lambda run, _: run.parallel.reduce == "two_level", lambda run: f'parallel.reduce = "{run.parallel.reduce}"'
    ),
    "local axis": Feature(
        lambda run, sizes: sizes.get("local", 1) > 1, lambda run: f"the mesh {run.mesh!r} with local"
    ),
    "compressed gradients": Feature(lambda run, _: bool(run.grads.compress), _compress),
    "fixed global batch": Feature(lambda run, _: run.peers.batch > 0, lambda run: f"peers.batch = {run.peers.batch}"),
    "adaptive ranks": Feature(lambda run, _: run.grads.is_adaptive, _compress),
    "no data axis": Feature(lambda run, sizes: sizes.get("data", 1) == 1, lambda run: f"the mesh {run.mesh!r}"),
    # Model
    "loss scaling": Feature(lambda run, _: run.model.dtype == "float16", lambda run: 'model.dtype = "float16"'),
    "delayed fp8 scaling": Feature(lambda run, _: run.model.matmul_precision == "fp8_delayed", _precision),
    "FP4 matmuls": Feature(lambda run, _: run.model.matmul_precision == "mxfp4", _precision),
    "low-precision matmuls": Feature(lambda run, _: run.model.matmul_precision != "plain", _precision),
    "experts": Feature(
        lambda run, _: bool(run.model.mixtures) or run.adapter.has_experts, lambda run: "a model with experts"
    ),
    "no experts": Feature(lambda run, _: not run.model.mixtures, lambda run: "a model without experts"),
    "folded experts": Feature(lambda run, _: bool(run.parallel.experts), _folding),
    "experts folded over data or fsdp": Feature(_folds_rows, _folding),
    "scaled embedding gradient": Feature(
        lambda run, _: run.model.embed_grad != 1.0, lambda run: f"model.embed_grad = {run.model.embed_grad}"
    ),
    "partial recomputation": Feature(lambda run, _: run.model.remat != "full", _remat),
    "saved values without names": Feature(lambda run, _: not saves_names_alone(run.model.remat), _remat),
    "selective recomputation": Feature(lambda run, _: run.model.remat not in ("none", "full"), _remat),
    "layerwise recomputation": Feature(lambda run, _: run.model.remat not in get_args(Remat), _remat),
    "offloaded or compact activations": Feature(
        lambda run, _: any(name in run.model.remat for name in ("offload", "@host", "compact")), _remat
    ),
    "compact activations": Feature(lambda run, _: "compact" in run.model.remat, _remat),
    "ladder residual": Feature(
        lambda run, _: run.model.residual != "plain", lambda run: f'model.residual = "{run.model.residual}"'
    ),
    "latent attention": Feature(
        lambda run, _: any(b.attention.has_keys and b.attention.kv_spec.latent for b in _block_kinds(run)),
        lambda run: "a model with latent attention",
    ),
    "recurrent layers": Feature(
        lambda run, _: any(not b.attention.has_keys for b in _block_kinds(run)),
        lambda run: "a model with recurrent layers",
    ),
    "split sequence": Feature(
        lambda run, sizes: sizes.get("context", 1) * sizes.get("ulysses", 1) > 1,
        lambda run: f"the mesh {run.mesh!r} with context or ulysses",
    ),
    "parameters not in bfloat16": Feature(
        lambda run, _: run.model.param_dtype != "bfloat16", lambda run: f'model.param_dtype = "{run.model.param_dtype}"'
    ),
    # Optimizer
    "layerwise optimizer": Feature(lambda run, _: run.optim.spec.layerwise, _optimizer),
    "optimizer of whole gradients": Feature(lambda run, _: not run.optim.spec.layerwise, _optimizer),
    "optimizer without stages": Feature(
        lambda run, _: bool(run.optim.spec.why_not_staged),
        lambda run: f"{_optimizer(run)} ({run.optim.spec.why_not_staged})",
    ),
    "optimizer of several passes": Feature(lambda run, _: not run.optim.spec.one_pass, _optimizer),
    "optimizer without backward pass": Feature(lambda run, _: not run.optim.spec.passes, _optimizer),
    "layerwise backward pass": Feature(
        lambda run, _: run.optim.spec.layerwise and run.optim.spec.passes > 0, _optimizer
    ),
    "projected gradients": Feature(lambda run, _: run.optim.spec.projected, _optimizer),
    "averaging optimizer": Feature(lambda run, _: run.optim.spec.averaging, _optimizer),
    "optimizer of the cross-entropy": Feature(lambda run, _: run.optim.spec.cross_entropy_only, _optimizer),
    "optimizer of all parameters": Feature(
        lambda run, _: run.optim.spec.hooks is not None and not run.optim.spec.subsets, _optimizer
    ),
    "optimizer that is not streamed": Feature(lambda run, _: not run.optim.spec.streamable, _optimizer),
    "optimizer that is not elementwise": Feature(lambda run, _: not run.optim.spec.elementwise, _optimizer),
    "optimizer that changes the step": Feature(lambda run, _: run.optim.spec.hooks is not None, _optimizer),
    "rounded updates": Feature(lambda run, _: run.optim.rounding != "nearest", _rounding),
    "narrow moments": Feature(
        lambda run, _: run.optim.moments != "float32", lambda run: f'optim.moments = "{run.optim.moments}"'
    ),
    "gradient accumulation": Feature(lambda run, _: run.accumulate > 1, lambda run: f"accumulate = {run.accumulate}"),
    # Step
    "reaction to spikes": Feature(lambda run, _: run.spikes.action != "none", _spikes),
    "undone updates": Feature(lambda run, _: run.spikes.action in ("skip", "lower_rate"), _spikes),
    "lowered rate": Feature(lambda run, _: run.spikes.action == "lower_rate", _spikes),
    "rollback": Feature(lambda run, _: run.spikes.action == "rollback", _spikes),
    "parameter average": Feature(lambda run, _: run.ema.decay > 0, lambda run: f"ema.decay = {run.ema.decay}"),
    "trackers of one run": Feature(
        lambda run, _: bool({"wandb", "trackio"} & set(run.observe.sinks)),
        lambda run: f"observe.sinks = {', '.join(run.observe.sinks)}",
    ),
    "norms by layer": Feature(
        lambda run, _: run.observe.layers_every > 0, lambda run: f"observe.layers_every = {run.observe.layers_every}"
    ),
    "routing losses": Feature(
        lambda run, _: (
            bool(run.model.mixtures or run.adapter.has_experts)
            and bool(run.routing.balance_loss or run.routing.z_loss or run.routing.bias_rate)
        ),
        lambda run: "routing.balance_loss, routing.z_loss or routing.bias_rate",
    ),
    "losses of routers": Feature(
        lambda run, _: (
            bool(run.model.mixtures or run.adapter.has_experts) and bool(run.routing.balance_loss or run.routing.z_loss)
        ),
        lambda run: "routing.balance_loss or routing.z_loss",
    ),
    "absent experts": Feature(
        lambda run, _: run.routing.absent > 0, lambda run: f"routing.absent = {run.routing.absent}"
    ),
    "balance biases that move": Feature(
        lambda run, _: bool(run.model.mixtures) and run.routing.bias_rate > 0,
        lambda run: f"routing.bias_rate = {run.routing.bias_rate}",
    ),
    "evaluation during the run": Feature(
        lambda run, _: run.eval_every > 0, lambda run: f"eval_every = {run.eval_every}"
    ),
    "profiles": Feature(
        lambda run, _: bool(run.observe.profile), lambda run: f"observe.profile = {run.observe.profile!r}"
    ),
    # Host
    "optimizer offload": Feature(lambda run, _: run.host.optimizer or bool(run.disk.directory), _offloaded_optimizer),
    "optimizer state on the host": Feature(lambda run, _: run.host.optimizer, lambda run: "host.optimizer"),
    "optimizer state on disk": Feature(lambda run, _: bool(run.disk.directory), _offloaded_optimizer),
    "parameters on disk": Feature(lambda run, _: run.disk.parameters, lambda run: "disk.parameters"),
    "update of the next step": Feature(
        lambda run, _: run.optim.spec.deferred and run.host.params,
        lambda run: f'host.params with optim.kind = "{run.optim.kind}"',
    ),
    "parameter offload": Feature(lambda run, _: run.host.params, lambda run: "host.params"),
    "updates on the host": Feature(
        lambda run, _: run.host.optimizer and run.host.device_every > 1,
        lambda run: f"host.device_every = {run.host.device_every}",
    ),
    "overlapped saves": Feature(
        lambda run, _: run.checkpoint.saving == "overlapped", lambda run: 'checkpoint.saving = "overlapped"'
    ),
    "blocking saves": Feature(
        lambda run, _: run.checkpoint.saving == "blocking", lambda run: 'checkpoint.saving = "blocking"'
    ),
    "elastic": Feature(lambda run, _: run.elastic.enabled, lambda run: "--elastic"),
    "checkpoints in memory": Feature(lambda run, _: run.checkpoint.memory is not None, lambda run: "checkpoint.memory"),
    # Objective
    "objective with its own forward passes": Feature(lambda run, _: _own_forward(run), _objective),
    "other objective": Feature(lambda run, _: run.objective.name != "cross_entropy", _objective),
    "objective over several tokens": Feature(lambda run, _: not _per_token(run), _objective),
    "value head": Feature(lambda run, _: make_objective(run.objective, run.z_loss).value_head, _objective),
    "reference model": Feature(lambda run, _: bool(run.reference), lambda run: f"reference = {run.reference!r}"),
    "trainable subset": Feature(
        lambda run, _: bool(run.trainable), lambda run: f"trainable = {', '.join(run.trainable)}"
    ),
    "adapter": Feature(lambda run, _: bool(run.adapter), lambda run: f'adapter.kind = "{run.adapter.kind}"'),
    "no adapter": Feature(lambda run, _: not run.adapter, lambda run: 'adapter.kind = "none"'),
    "adapter that is not LoRA": Feature(
        lambda run, _: run.adapter.kind not in ("none", "lora", "rslora", "dora"),
        lambda run: f'adapter.kind = "{run.adapter.kind}"',
    ),
    "shifted groups": Feature(
        lambda run, _: run.adapter.kind == "longlora", lambda run: f'adapter.kind = "{run.adapter.kind}"'
    ),
    "virtual tokens": Feature(
        lambda run, _: run.adapter.virtual_tokens > 0, lambda run: f'adapter.kind = "{run.adapter.kind}"'
    ),
    "frozen balance biases": Feature(
        lambda run, _: bool(run.trainable) and any(path.endswith("balance_bias") for path in _frozen(run)),
        lambda run: f"trainable = {', '.join(run.trainable)}",
    ),
}

TOGETHER = "runs trained together"
"""Feature of runs with one joint step (``jaxllm.train.together``), which no setting of a run says."""
FEATURES[TOGETHER] = Feature(lambda run, _: False, lambda run: f"a joint step of {run.name} and other runs")

CO_SERVED = "run beside serving"
"""Feature of runs that advance in what an engine leaves of its steps (``jaxllm.posttrain.coserve``)."""
FEATURES[CO_SERVED] = Feature(lambda run, _: False, lambda run: f"{run.name} beside serving (--finetune)")

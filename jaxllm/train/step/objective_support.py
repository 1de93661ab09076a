"""Checks that a run's objective, trainable subset and reference model fit its mesh, optimizer and data."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import tree_leaves_with_path as leaves_with_path

from jaxllm.config import ConfigError
from jaxllm.data.batch import TOKEN_VALUES, Batch
from jaxllm.models import Functional
from jaxllm.models.param_subset import trainable_mask
from jaxllm.train.config import RunConfig
from jaxllm.train.step.objective import HeadObjective, make_objective

SCORES = "reference_logprobs"
"""Field of a batch that a reference model fills in."""


def check_objective(config: RunConfig, mesh: Mesh | AbstractMesh) -> None:
    """Checks that the run's steps can take the objective, and that the reference model has a use.

    Raises:
        ConfigError: names the unsupported setting and what is legal.
    """
    objective = make_objective(config.objective, config.z_loss)
    said, kind = f'objective.name = "{config.objective.name}"', config.optim.kind
    if config.reference and SCORES not in (*objective.required, *objective.optional):
        raise ConfigError(f"reference = {config.reference!r}, but {said} reads no {SCORES}: leave reference empty.")
    if mesh.shape.get("stage", 1) > 1:
        if not (isinstance(objective, HeadObjective) and objective.per_token):
            raise ConfigError(
                f"{said} is not a sum over single tokens, but a device of a pipeline sees only its own rows: "
                f"leave stage out of the mesh {config.mesh!r}."
            )
        if config.reference:
            raise ConfigError(
                f"reference = {config.reference!r}: a pipeline cannot score batches with a reference model. Leave it "
                f"empty and give {SCORES} with the data, or leave stage out of the mesh {config.mesh!r}."
            )
    if isinstance(objective, HeadObjective):
        return
    own = f"{said} runs its own forward passes"
    if config.optim.spec.layerwise:
        raise ConfigError(f'{own}, which optim.kind = "{kind}" would have to run layer by layer: choose another.')
    if config.parallel.layout != "contiguous" and mesh.shape.get("context", 1) > 1:
        raise ConfigError(f"{own}, on rows in their own order: set parallel.layout to contiguous.")
    if config.model.mixtures and (config.routing.balance_loss or config.routing.z_loss or config.routing.bias_rate):
        raise ConfigError(
            f"{own}, without the routing losses of experts: set routing.balance_loss, routing.z_loss and "
            "routing.bias_rate to 0."
        )


def check_trainable(config: RunConfig, model: Functional) -> None:
    """Checks that the run's optimizer supports a subset of the parameters.

    Raises:
        ConfigError: a pattern matches nothing, or names the unsupported setting.
    """
    mask = trainable_mask(model, config.trainable)
    if mask is None:
        return
    said, kind = f"trainable = {', '.join(config.trainable)}", config.optim.kind
    if config.optim.spec.hooks is not None:
        raise ConfigError(f'{said}: optim.kind = "{kind}" updates all parameters; choose another optimizer.')
    if config.host.optimizer:
        raise ConfigError(f"{said}: optimizer offload streams the state of all layers; set host.optimizer to false.")
    names = [jax.tree_util.keystr(path[-1:], simple=True) for path, on in leaves_with_path(mask) if not on]
    if config.routing.bias_rate and "balance_bias" in names:
        raise ConfigError(
            f"{said}: routing.bias_rate = {config.routing.bias_rate} moves the routers' balance biases, which stay "
            'frozen; set it to 0, or add "balance_bias".'
        )


def check_batch_fields(config: RunConfig, batch: Batch) -> None:
    """Checks the shape of a data source's batches, and that their optional fields are those that the objective reads.

    Args:
        config: the run.
        batch: the first one, all rows of it.

    Raises:
        ConfigError: says which field is missing, or has no use.
    """
    objective = make_objective(config.objective, config.z_loss)
    said = f'objective.name = "{config.objective.name}"'
    shape = (config.data.batch_size, config.data.seq_len)
    for name, part in zip(Batch._fields, batch, strict=True):
        if part is not None and part.shape != shape:
            raise ConfigError(
                f"the data source's batches have {name} of shape {list(part.shape)}; the run's settings say "
                f"{list(shape)} (data.batch_size, data.seq_len)."
            )
    given = {name for name in TOKEN_VALUES if getattr(batch, name) is not None}
    if config.reference and SCORES in given:
        raise ConfigError(f"the data source gives {SCORES}, which reference = {config.reference!r} would overwrite.")
    given |= {SCORES} if config.reference else set()
    for name in objective.required:
        if name not in given:
            instead = " Name a reference model in `reference`, or give them with the data." * (name == SCORES)
            raise ConfigError(f"{said} reads {name}, which the data source's batches do not have.{instead}")
    for name in sorted(given - {*objective.required, *objective.optional}):
        raise ConfigError(f"the data source's batches have {name}, which {said} does not read: leave it out.")

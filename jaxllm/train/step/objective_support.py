"""Checks that a run's objective and reference model fit each other and its data."""

from __future__ import annotations

from jaxllm.config import ConfigError
from jaxllm.data.batch import TOKEN_VALUES, Batch
from jaxllm.train.config import RunConfig
from jaxllm.train.step.objective import make_objective

SCORES = "reference_logprobs"
"""Field of a batch that a reference model fills in."""


def check_reference(config: RunConfig) -> None:
    """Checks that the objective uses the reference model; raises ConfigError."""
    objective = make_objective(config.objective, config.z_loss)
    if config.reference and SCORES not in (*objective.required, *objective.optional):
        raise ConfigError(
            f'reference = {config.reference!r}, but objective.name = "{config.objective.name}" reads no {SCORES}: '
            "leave reference empty."
        )


def check_content(config: RunConfig) -> None:
    """Checks that the run's data is of the kind that the objective takes; raises ConfigError."""
    objective = make_objective(config.objective, config.z_loss)
    for one in config.data.sources:
        if one.content not in objective.contents:
            legal = " or ".join(f'"{name}"' for name in objective.contents)
            raise ConfigError(
                f'objective.name = "{config.objective.name}" takes data.content = {legal}, not "{one.content}"; change '
                "one of them."
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

"""Resume: the state that a run starts from, its newest intact checkpoint or fresh parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax

from jaxllm.checkpoint import CheckpointCorruptError, state_providers
from jaxllm.config import differences, from_dict
from jaxllm.models.value_head import fresh_value_head, put_value_head
from jaxllm.train.config import RunConfig
from jaxllm.train.frozen_base import trained_only
from jaxllm.train.recovery.saving import Saver
from jaxllm.train.run import Run
from jaxllm.train.run_model import has_value_head
from jaxllm.train.step.step_builder import init_run_state
from jaxllm.train.step.step_chain import link_states, saved_state
from jaxllm.train.step.train_state import TrainState, init_extras


class ResumeError(ValueError):
    """A run cannot resume with this configuration; the message lists what differs."""


def start_state(run: Run, saver: Saver) -> tuple[TrainState, int]:
    """State to start from, and the number of steps it has done: the newest intact checkpoint, or an initial state.

    Also restores the position in the data and the spikes recorded so far.

    Raises:
        ResumeError: the checkpoint's configuration or tokenizer differs from the run's.
    """
    if saver.latest() is None:
        params = None
        if run.base is not None:
            params = run.base.start_params(run.first_gradients)
        elif run.init_model is not None:
            given: list[Any] = [run.mesh, run.config.model.param_dtype]
            if run.param_files is not None:
                run.param_files.tier.renew()
                given.append(run.abstract.params)
            with jax.set_mesh(run.mesh):
                params = run.init_model.load(*given)
            if has_value_head(run.config):
                params = put_value_head(params, fresh_value_head(run.abstract.params["head"]["value"]))
        files = run.state_files, run.param_files, run.uneven_state
        return init_run_state(run.config, run.model, run.optimizer, run.mesh, run.abstract, params, *files), 0
    with contextlib.suppress(CheckpointCorruptError):  # then an older checkpoint is checked, below
        meta = saver.read_meta()
        check_resumable(meta, run.config, run.directory.path)
        check_replicas(meta, run.replicas, run.directory.path)
        state_providers.check_providers(meta, run.also)
    for files in (run.state_files, run.param_files):
        if files is not None:
            files.tier.renew()
    saved = trained_only(run.base, saved_state(run.abstract, run.links))
    found = saver.resume(state_providers.with_provider_targets(saved, run.also))
    if found is None:  # another process emptied the directory meanwhile
        raise ResumeError(f"the checkpoints in {run.directory.checkpoints} have been deleted; start again.")
    check_resumable(found.meta, run.config, run.directory.path)
    state_providers.check_providers(found.meta, run.also)
    if found.meta["tokenizer"] != run.data.tokenizer.fingerprint:
        raise ResumeError(
            f"{run.directory.path} was trained with another tokenizer (fingerprint {found.meta['tokenizer'][:12]}; "
            f"data.tokenizer = {run.config.data.tokenizer!r} now gives {run.data.tokenizer.fingerprint[:12]}). "
            f"Use {run.directory.tokenizer}, or start a new run under another name."
        )
    if run.reference is not None and not run.reference.facts().items() <= found.meta["reference"].items():
        raise ResumeError(
            f"{run.directory.path} was trained with another reference model: {found.meta['reference']}, now "
            f"{run.reference.facts()}. Restore the parameters of reference = {run.reference.source!r}, or start a new "
            "run under another name."
        )
    state = state_providers.restore_providers(saved, found.state, found.meta, run.also)
    if run.base is not None:
        params = run.base.start_params()
        if found.meta["base"] != run.base.facts():
            raise ResumeError(
                f"{run.directory.path} holds adapters of another base: {found.meta['base']}, now {run.base.facts()}. "
                f"Restore the parameters of init_from = {run.config.init_from!r}, or start a new run under another "
                "name."
            )
        state = run.base.with_base(state, params)
    fresh = link_states([link for link in run.links if link.transient])
    state = dataclasses.replace(state, extras={**state.extras, **init_extras(fresh, state.params, run.abstract)})
    run.batches, step = run.batches.at_cursor(found.meta["cursor"])
    run.spikes = list(found.meta.get("spikes", []))
    return state, step


def check_replicas(meta: dict[str, Any], replicas: int, directory: Path) -> None:
    """Checks that the number of replicas is that of the checkpoint; raises ResumeError."""
    if (saved := meta.get("replicas", 1)) != replicas:
        raise ResumeError(
            f"{directory} was trained with {saved} replicas, each of which has an optimizer state of its own, but the "
            f"mesh now has {replicas}; give the mesh replica={saved}. Its other axes may have other sizes."
        )


def check_resumable(meta: dict[str, Any], config: RunConfig, directory: Path) -> None:
    """Checks that the configuration changes nothing that affects the results of the run.

    Args:
        meta: of the checkpoint.
        config: of this start.
        directory: of the run, for the message.

    Raises:
        ResumeError: lists every such difference.
    """
    changed = differences(from_dict(type(config), meta["config"], "the checkpoint's config"), config)
    listed = [str(d) for d in changed if not d.runtime_only]
    if listed:
        longer = next((d.new for d in changed if d.path == "steps" and d.new > d.old), None)
        how = (
            f"\nThe learning-rate schedule is spread over all steps, so a run cannot be made longer afterwards. "
            f"To train longer, start a run of N further steps from its parameters: --name NEW --init-from {directory} "
            f"--steps N; or train anew: --name NEW --steps {longer}."
        )
        raise ResumeError(
            f"{directory} holds a run with another configuration:\n  "
            + "\n  ".join(listed)
            + "\nThese change the results, so the run cannot resume with them. "
            "Set them back to resume, or choose another --name to start a new run."
            + (how if longer is not None else "")
        )

"""Receipt of a finished run: what was run and its results, so that it can be reproduced and compared."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxllm.config import digest, from_dict, to_dict
from jaxllm.train.config import RunConfig

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class ReceiptError(ValueError):
    """A receipt cannot be read, or does not describe a finished run."""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that determine bitwise results."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def git_commit() -> str | None:
    """Git commit of this source tree, with ``+changes`` if it is not clean; None outside of a git checkout."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def make_receipt(config: RunConfig, *, data_hash: str, result: dict[str, Any]) -> dict[str, Any]:
    """Receipt of a finished run.

    Args:
        config: of the run.
        data_hash: fingerprint of its training data.
        result: final values: steps, nll, heldout_nll, heldout_bits_per_byte.
    """
    device = jax.devices()[0]
    return {
        "commit": git_commit(),
        "versions": versions(),
        "device": {"kind": device.device_kind, "platform": device.platform, "count": jax.device_count()},
        "config": to_dict(config),
        "config_hash": digest(config),
        "data_hash": data_hash,
        "result": result,
    }


def read_receipt(file: Path) -> dict[str, Any]:
    """Reads a receipt.

    Raises:
        ReceiptError: the file is missing or is not a receipt; names what is missing.
    """
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise ReceiptError(f"there is no {file}; a finished run writes receipt.json into its directory.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ReceiptError(f"{file} cannot be read as a receipt: {error}") from error
    keys = ("commit", "versions", "device", "config", "config_hash", "data_hash", "result")
    missing = [key for key in keys if not isinstance(value, dict) or key not in value]
    if missing:
        raise ReceiptError(f"{file} is not a receipt: it has no {', '.join(missing)}.")
    return value


def reproduction_config(receipt: dict[str, Any], out: Path) -> RunConfig:
    """Configuration to reproduce a receipt's run, in the directory ``out``.

    Raises:
        ReceiptError: the configuration is not the one that was run, or a run of that name exists in ``out``.
        ConfigError: the configuration belongs to another version of jaxllm; names the key.
    """
    if "algorithm" in receipt["config"]:
        raise ReceiptError(
            "the receipt is of reinforcement learning; train its recipe again under another --name to repeat it: its "
            "rollouts depend on the seed alone."
        )
    config = from_dict(RunConfig, receipt["config"], "the receipt's config")
    if digest(config) != receipt["config_hash"]:
        raise ReceiptError(
            f"the receipt's config has hash {digest(config)}, but its config_hash is {receipt['config_hash']}: one of "
            f"them was changed, or jaxllm's settings have changed since commit {receipt['commit']}, which wrote it."
        )
    if (out / config.name).exists():
        raise ReceiptError(f"{out / config.name} exists; choose another --out so that the run starts from scratch.")
    return replace(config, out=str(out))


def compare_receipts(old: dict[str, Any], new: dict[str, Any], tolerance: float = 0.01) -> tuple[bool, str]:
    """Compares two receipts: whether the second run reproduced the first, and a description.

    On the same versions, device kind, mesh and commit the final losses must be bitwise equal; otherwise they may
    differ by ``tolerance``, relative, and the description lists the differences of the environments.
    """
    if old["config_hash"] != new["config_hash"] or old["data_hash"] != new["data_hash"]:
        return False, "different runs: " + ", ".join(k for k in ("config_hash", "data_hash") if old[k] != new[k])
    if "nll" not in old["result"]:
        return False, "the receipt's result has no nll, so there is nothing to compare."
    lines = []
    other = [
        f"{key}: {old[key]} then, {new[key]} now" for key in ("commit", "versions", "device") if old[key] != new[key]
    ]
    if old["config"]["mesh"] != new["config"]["mesh"]:
        other.append(f"mesh: {old['config']['mesh']} then, {new['config']['mesh']} now")
    bound = tolerance if other else 0.0
    equal = True
    for key, was in old["result"].items():
        if "nll" not in key and "bits" not in key:
            continue
        now = new["result"].get(key, math.nan)
        difference = 0.0 if now == was else abs(now - was) / abs(was) if was else math.inf
        good = difference <= bound
        equal &= good
        verdict = "equal to the last bit" if difference == 0 else f"relative difference {difference:.2e}"
        lines.append(f"{key}: {was!r} then, {now!r} now: {verdict}{'' if good else f', more than {bound}'}")
    if other:
        lines.append(f"Different environments, so a difference of {tolerance:.0%} is allowed: " + "; ".join(other))
    return equal, "\n".join(lines)

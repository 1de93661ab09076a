"""What was run and what came out: enough to run it again and compare."""

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
    """A receipt cannot be read or does not describe a finished run."""


def versions() -> dict[str, str]:
    """Versions that decide the last bits of a result."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def git_commit() -> str | None:
    """The commit of this source tree, ``+changes`` if it is not clean; None where it is not a git checkout."""
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
    """The receipt of a finished run.

    Args:
        result: final figures: steps, nll, heldout_nll, heldout_bits_per_byte, tokens, seconds.
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
    """A receipt from disk.

    Raises:
        ReceiptError: it is not there or not a receipt; names what is missing.
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
    """The receipt's configuration, to be run under ``out``.

    Raises:
        ReceiptError: the configuration is not the one that was run, or a run is there already.
        ConfigError: the configuration is of another version of jaxllm; names the key.
    """
    config = from_dict(RunConfig, receipt["config"], "the receipt's config")
    if digest(config) != receipt["config_hash"]:
        raise ReceiptError(
            f"the receipt's config has hash {digest(config)}, the receipt says {receipt['config_hash']}: one of them "
            f"was changed, or the settings of jaxllm have been since. It was made at commit {receipt['commit']}."
        )
    if (out / config.name).exists():
        raise ReceiptError(f"{out / config.name} exists; choose another --out so that the run starts from scratch.")
    return replace(config, out=str(out))


def compare_receipts(old: dict[str, Any], new: dict[str, Any], tolerance: float = 0.01) -> tuple[bool, str]:
    """Whether the second run reproduced the first, and the comparison in words.

    On the same versions, device kind, mesh and commit the final losses must be equal to the last bit; otherwise they
    may differ by ``tolerance``, relative, and the text says what was not the same.
    """
    if old["config_hash"] != new["config_hash"] or old["data_hash"] != new["data_hash"]:
        return False, "not the same work: " + ", ".join(k for k in ("config_hash", "data_hash") if old[k] != new[k])
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
        lines.append(f"Not the same surroundings, so {tolerance:.0%} is allowed: " + "; ".join(other))
    return equal, "\n".join(lines)

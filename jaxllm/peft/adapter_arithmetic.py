"""Arithmetic of adapters in PEFT's files, module by module and without their base: differences, sums, lower ranks.

A weighted sum of products is a product of longer factors; the singular value decomposition brings it to a lower rank
with the least error. It is computed from QR decompositions of the factors, so that no dense weight is formed.

Legend: r rank, i inputs, o outputs of a module.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxllm.hub.safetensors import hub_directory, open_file, write_file
from jaxllm.peft.adapter import AdapterError
from jaxllm.peft.peft_files import BASE, CONFIG, LORA_KEY, PREFIX, WEIGHTS, check_config, read_base, read_config
from jaxllm.peft.peft_targets import pattern_value


@dataclass(frozen=True)
class ModuleProduct:
    """Product ``b @ a`` that an adapter adds to the weight ``[o, i]`` of a module.

    Attributes:
        a: ``[r, i]``.
        b: ``[o, r]``, with the scale in it.
    """

    a: Float[np.ndarray, "r i"]
    b: Float[np.ndarray, "o r"]

    def inner(self, other: ModuleProduct) -> float:
        """Sum over all elements of the two products, multiplied."""
        return float(np.sum((self.b.T @ other.b) * (self.a @ other.a.T)))

    def to_rank(self, rank: int) -> ModuleProduct:
        """The nearest product of a rank, by the singular value decomposition."""
        if rank >= self.a.shape[0]:
            return self
        (q_b, r_b), (q_a, r_a) = np.linalg.qr(self.b), np.linalg.qr(self.a.T)
        u, s, vt = np.linalg.svd(r_b @ r_a.T)
        root = np.sqrt(s[:rank])
        return ModuleProduct(root[:, None] * (vt[:rank] @ q_a.T), (q_b @ u[:, :rank]) * root)


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter of PEFT as its files have it.

    Attributes:
        path: its directory.
        config: its ``adapter_config.json``.
        products: what it adds to each module, by name; empty for DoRA, whose weights are no sums.
        nbytes: bytes of its tensors.
        base: name of its base; "" if unknown.
        base_hash: hash of its base; "" if unknown.
        dtype: of its factors.
        modules: names of the modules that it adapts.
        whole: names of the tensors that it replaces.
    """

    path: Path
    config: Mapping[str, Any]
    products: Mapping[str, ModuleProduct]
    nbytes: int
    base: str
    base_hash: str
    dtype: np.dtype
    modules: tuple[str, ...]
    whole: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The method, as in ``jaxllm.peft.adapter``."""
        return "dora" if self.config.get("use_dora") else "rslora" if self.config.get("use_rslora") else "lora"


@dataclass(frozen=True)
class ModuleDifference:
    """Difference of two adapters in one module: its norm over that of the first product, and their cosine."""

    module: str
    relative: float
    cosine: float


def open_adapter(folder: Path | str) -> AdapterFiles:
    """Opens an adapter's directory.

    Raises:
        AdapterError: it is none, of another kind, or incomplete.
    """
    folder = Path(folder)
    config = read_config(folder)
    try:
        check_config(config)
        base = read_base(folder)
        tensors = {key.removeprefix(PREFIX): value for key, value in open_file(folder / WEIGHTS).items()}
        factors: dict[str, dict[str, np.ndarray]] = {}
        for key, value in tensors.items():
            if (found := LORA_KEY.fullmatch(key)) is not None and found["module"]:
                factors.setdefault(found["module"], {})[found["part"]] = value
        if lost := [name for name, parts in factors.items() if len(parts) < 2]:
            raise AdapterError(f"{WEIGHTS}: {lost[0]} lacks one of its two factors; the file is incomplete.")
        if not factors:
            raise AdapterError(f"{WEIGHTS} has no factors; it is not an adapter.")
        made = AdapterFiles(
            path=folder,
            config=config,
            products={},
            nbytes=sum(value.nbytes for value in tensors.values()),
            base=config.get("base_model_name_or_path") or base.get("base", ""),
            base_hash=base.get("hash", ""),
            dtype=next(iter(factors.values()))["lora_A"].dtype,
            modules=tuple(sorted(factors)),
            whole=tuple(sorted(key for key in tensors if LORA_KEY.fullmatch(key) is None)),
        )
    except ValueError as error:
        raise AdapterError(f"{folder}: {str(error).removeprefix(f'{folder}: ')}") from error
    if made.kind == "dora":
        return made
    products = {name: _product(config, made.kind, name, factors[name]) for name in made.modules}
    return replace(made, products=products)


def difference(one: AdapterFiles, other: AdapterFiles) -> list[ModuleDifference]:
    """Differences of two adapters, module by module; a module that one lacks counts as zero there.

    Raises:
        AdapterError: one of them is DoRA's.
    """
    _check_sums([one, other])
    found = []
    for module in sorted({*one.modules, *other.modules}):
        a, b = one.products.get(module), other.products.get(module)
        aa, bb = (0.0 if x is None else x.inner(x) for x in (a, b))
        ab = 0.0 if a is None or b is None else a.inner(b)
        distance = math.sqrt(max(0.0, aa - 2 * ab + bb))
        relative = distance / math.sqrt(aa) if aa else math.inf if bb else 0.0
        found.append(ModuleDifference(module, relative, ab / math.sqrt(aa * bb) if aa and bb else 0.0))
    return found


def add_adapters(
    adapters: Sequence[AdapterFiles], weights: Sequence[float], out: Path | str, rank: int | None = None
) -> dict[str, float]:
    """Writes the weighted sum of adapters of one base as an adapter.

    Args:
        adapters, weights: the summands and their factors.
        out: directory to create.
        rank: rank of the sum in every module, the nearest by singular value decomposition; None: as exact as it is,
            with the sum of the ranks.

    Returns:
        by module, the norm of what a lower rank leaves out over that of the sum.

    Raises:
        AdapterError: the adapters are of several bases, of DoRA, or replace whole tensors; or the rank is illegal.
        HubError: the directory exists.
    """
    _check_sums(adapters)
    if len(weights) != len(adapters):
        raise AdapterError(f"{len(adapters)} adapters, but {len(weights)} weights; give one for each.")
    if rank is not None and rank < 1:
        raise AdapterError(f"rank = {rank}; give a positive number.")
    if with_whole := [one for one in adapters if one.whole]:
        raise AdapterError(
            f"{with_whole[0].path} replaces whole tensors ({with_whole[0].whole[0]}), which have no sum; merge it."
        )
    for name in ("base_hash", "base"):
        if len(found := {getattr(one, name) for one in adapters} - {""}) > 1:
            raise AdapterError(f"the adapters are of several bases: {', '.join(sorted(found))}.")
    tensors, ranks, errors = {}, {}, {}
    dtype = max((one.dtype for one in adapters), key=lambda dtype: dtype.itemsize)
    for module in sorted({name for one in adapters for name in one.modules}):
        parts = [(one.products[module], w) for one, w in zip(adapters, weights, strict=True) if module in one.modules]
        shapes = {(part.b.shape[0], part.a.shape[1]) for part, _ in parts}
        if len(shapes) > 1:
            raise AdapterError(f"{module} has several shapes ({shapes}): the adapters are of several bases.")
        whole = ModuleProduct(
            np.concatenate([part.a for part, _ in parts]), np.concatenate([w * part.b for part, w in parts], axis=1)
        )
        lower = whole if rank is None else whole.to_rank(rank)
        square = whole.inner(whole)
        left = max(0.0, square - 2 * whole.inner(lower) + lower.inner(lower))
        errors[module] = math.sqrt(left / square) if square else 0.0
        tensors[f"{PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(lower.a.astype(dtype))
        tensors[f"{PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(lower.b.astype(dtype))
        ranks[module] = lower.a.shape[0]
    most = max(ranks.values())
    patterns = {module: own for module, own in ranks.items() if own != most}
    config = {
        **adapters[0].config,
        "use_rslora": False,
        "r": most,
        "lora_alpha": most,
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
        "target_modules": sorted(ranks),
        "exclude_modules": None,
        "layers_to_transform": None,
    }
    with hub_directory(Path(out)) as temporary:
        write_file(temporary / WEIGHTS, tensors)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True))
        if hashes := [one for one in adapters if one.base_hash]:
            base = {"base": hashes[0].base, "hash": hashes[0].base_hash}
            (temporary / BASE).write_text(json.dumps(base, indent=2) + "\n")
    return errors


def _product(config: Mapping[str, Any], kind: str, name: str, parts: Mapping[str, np.ndarray]) -> ModuleProduct:
    a, b = (parts[part].astype(np.float64) for part in ("lora_A", "lora_B"))
    rank = pattern_value(config.get("rank_pattern"), name, config["r"])
    if a.shape[0] != rank or b.shape[1] != rank:
        raise AdapterError(
            f"{WEIGHTS}: the factors of {name} have the ranks {a.shape[0]} and {b.shape[1]}, not {rank}."
        )
    alpha = pattern_value(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    return ModuleProduct(a, b * (alpha / (math.sqrt(rank) if kind == "rslora" else rank)))


def _check_sums(adapters: Sequence[AdapterFiles]) -> None:
    if odd := [one for one in adapters if one.kind == "dora"]:
        raise AdapterError(f"{odd[0].path} is an adapter of dora, which is no sum with its base; merge it instead.")

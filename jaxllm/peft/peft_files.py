"""PEFT files: reads and writes adapters as the library ``peft`` does, ``adapter_config.json`` beside
``adapter_model.safetensors`` (https://github.com/huggingface/peft): LoRA here, virtual tokens in
``jaxllm.peft.virtual_token_files``.

Names of modules go through the weight tables of the hub, families with fused matrices included. A fused module
(``qkv_proj``) has one input factor for all its weights: reading gives each weight that factor and its rows of the
output factor; writing weights whose input factors differ makes one module of the sum of their ranks, in blocks.

Legend: r rank, i inputs, o outputs of a module.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxllm.config import closest
from jaxllm.hub.families.families import family
from jaxllm.hub.huggingface import leaves_by_path, to_hf_tensor
from jaxllm.hub.safetensors import hub_directory, open_file, write_file
from jaxllm.hub.weight_mapping import HFTensor, TensorPart, hf_layout
from jaxllm.models import Functional
from jaxllm.models.functional import LinearShape
from jaxllm.peft import virtual_token_files
from jaxllm.peft.adapter import Adapter, AdapterError, AdapterKind
from jaxllm.peft.base_hash import is_other_base
from jaxllm.peft.low_rank_factors import LowRank
from jaxllm.peft.peft_targets import module_targets, pattern_value

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"
"""Files of an adapter's directory; ``base.json`` is ours alone, with the name and the hash of the base."""
PREFIX = "base_model.model."
LORA_KEY = re.compile(r"(?P<module>.+)\.(?P<part>lora_A|lora_B)\.weight|(?P<dora>.+)\.lora_magnitude_vector(\.weight)?")
READ = {
    "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
    "modules_to_save", "layers_to_transform", "layers_pattern", "peft_type", "base_model_name_or_path",
}  # fmt: skip
"""Fields of ``adapter_config.json`` that are followed."""
WITHOUT_EFFECT = {
    "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core",
    "qalora_group_size", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
"""Fields that change nothing once an adapter is trained."""
NEUTRAL = {"task_type": ("CAUSAL_LM",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}
"""Legal values of further fields; for all others None, False and empty ones are."""


@dataclass(frozen=True)
class PeftModule:
    """Module of another library that adapters can target: its weights here, and which HF axis has the inputs."""

    tensor: HFTensor
    linears: tuple[LinearShape, ...]

    def split_a(self, a: Float[np.ndarray, "r i"]) -> list[np.ndarray]:
        """Input factors ``[*in, r]`` of the weights in the module: all are the same."""
        return [_grouped(a, part, shape, inputs=True) for part, shape in self._parts()]

    def split_outputs(self, array: Float[np.ndarray, "o *r"]) -> list[np.ndarray]:
        """Parts ``[*r, *out]`` of an array with a row for each output (``lora_B``, the magnitudes), by weight."""
        found, begin = [], 0
        for part, shape in self._parts():
            size = math.prod(shape.shape[shape.contract :])
            rows = np.moveaxis(array[begin : begin + size], 0, -1)
            found.append(_grouped(rows, part, shape, inputs=False))
            begin += size
        return found

    def join_a(self, factors: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Inverse of ``split_a``, one ``[r, i]`` for each weight."""
        return [_flat(a, part, shape, inputs=True) for a, (part, shape) in zip(factors, self._parts(), strict=True)]

    def join_outputs(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Inverse of ``split_outputs``, one ``[o, *r]`` for each weight."""
        pairs = zip(arrays, self._parts(), strict=True)
        return [np.moveaxis(_flat(b, part, shape, inputs=False), -1, 0) for b, (part, shape) in pairs]

    @property
    def inputs(self) -> int:
        """Number of inputs."""
        return math.prod(self.linears[0].shape[: self.linears[0].contract])

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return sum(math.prod(one.shape[one.contract :]) for one in self.linears)

    def _parts(self) -> Iterable[tuple[TensorPart, LinearShape]]:
        return zip(self.tensor.parts, self.linears, strict=True)


def read_peft(folder: Path | str, model: Functional, source: Mapping[str, Any], *, base_hash: str = "") -> Adapter:
    """Adapter in a directory of PEFT.

    Args:
        folder: has ``adapter_config.json`` and ``adapter_model.safetensors``.
        model: the base.
        source: ``config.json`` of the base, which says its family.
        base_hash: hash of the base (``jaxllm.peft.base_hash``), which the adapter's must equal if it has one in the
            same dtype; "": not compared.

    Raises:
        AdapterError: not an adapter of this base, of another kind, incomplete, damaged; says what and where.
    """
    folder = Path(folder)
    config = read_config(folder)
    try:
        return _read(folder, config, model, source, base_hash)
    except AdapterError as error:
        raise AdapterError(f"{folder}: {error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Parsed ``adapter_config.json`` of a directory; raises AdapterError."""
    file = folder / CONFIG
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise AdapterError(f"{folder} has no {CONFIG}; give the directory of a saved adapter.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{file} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise AdapterError(f"{file} is not a JSON object.")
    return value


def write_peft(folder: Path | str, adapter: Adapter, model: Functional, source: Mapping[str, Any]) -> None:
    """Writes an adapter as PEFT does, in a new directory; nothing is left behind if it fails.

    Raises:
        AdapterError: the family has no module for a weight.
        HubError: the directory exists, or the disk refuses.
    """
    if adapter.kind in virtual_token_files.PEFT_TYPES:
        config = dict(adapter.settings) or virtual_token_files.config_of(adapter, model)
        tensors = {virtual_token_files.TENSOR: virtual_token_files.tensor_of(adapter, model)}
        return _write(Path(folder), adapter, config, tensors)
    modules, layout = peft_modules(model, source)
    written_here = {part.path for module in modules.values() for part in module.tensor.parts}
    if left_out := sorted(adapter.factors.keys() - written_here):
        raise AdapterError(
            f"the adapter has factors for {left_out[0]}, for which a file of peft has no module here; merge it into "
            "the model instead (jaxllm convert RUN OUT --merge)."
        )
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, module in modules.items():
        written = _written_module(module, adapter)
        if written is None:
            continue
        a, b, magnitude, scale = written
        tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a, b
        if magnitude is not None:
            tensors[f"{PREFIX}{name}.lora_magnitude_vector"] = magnitude
        ranks[name] = a.shape[0]
        alphas[name] = scale * (math.sqrt(a.shape[0]) if adapter.kind == "rslora" else a.shape[0])
    for name, tensor in layout.items():
        if all(part.path in adapter.modules for part in tensor.parts):
            tensors[PREFIX + name] = to_hf_tensor(tensor, {p.path: adapter.modules[p.path] for p in tensor.parts})
    config = dict(adapter.settings) or _config(adapter, modules, ranks, alphas, layout)
    _write(Path(folder), adapter, config, tensors)


def _write(folder: Path, adapter: Adapter, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    with hub_directory(folder) as temporary:
        write_file(temporary / WEIGHTS, tensors)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True))
        if adapter.base_hash:
            base = {"base": adapter.base, "hash": adapter.base_hash}
            (temporary / BASE).write_text(json.dumps(base, indent=2) + "\n")


def peft_modules(
    model: Functional, source: Mapping[str, Any], *, bare: bool = False
) -> tuple[dict[str, PeftModule], dict[str, HFTensor]]:
    """Modules that adapters can target, and all tensors of the model, by their names in transformers."""
    layout = hf_layout(family(source).table, model.config, leaves_by_path(model.abstract()), bare=bare)
    linears = model.linears()
    modules = {
        name.removesuffix(".weight"): PeftModule(tensor, tuple(linears[part.path] for part in tensor.parts))
        for name, tensor in layout.items()
        if name.endswith(".weight") and all(part.path in linears for part in tensor.parts)
    }
    return modules, layout


def _read(
    folder: Path, config: Mapping[str, Any], model: Functional, source: Mapping[str, Any], base_hash: str
) -> Adapter:
    check_config(config)
    base = read_base(folder, base_hash)
    if not (folder / WEIGHTS).is_file():
        bin_file = (folder / "adapter_model.bin").exists()
        hint = (
            " adapter_model.bin is a pickle, which can run any code: save with safe_serialization." if bin_file else ""
        )
        raise AdapterError(f"there is no {WEIGHTS}; the adapter was not written completely.{hint}")
    try:
        tensors = open_file(folder / WEIGHTS)
    except ValueError as error:
        raise AdapterError(str(error)) from error
    if (virtual := virtual_token_files.kind_of(config)) is not None:
        whole = virtual_token_files.modules_of(virtual, config, tensors, model)
        name = config.get("base_model_name_or_path") or base.get("base", "")
        return Adapter(virtual, {}, {}, {}, whole, name, base.get("hash", ""), config)  # type: ignore[arg-type]
    if lost := [key for key in tensors if not key.startswith(PREFIX)]:
        raise AdapterError(f"{WEIGHTS}: {lost[0]} does not begin with {PREFIX}; not a file of PEFT.")
    tensors = {key.removeprefix(PREFIX): value for key, value in tensors.items()}
    table = family(source).table
    bare = not any(key.startswith((table.prefix, "lm_head")) for key in tensors)
    modules, layout = peft_modules(model, source, bare=bare)
    given, whole = _by_module(tensors, modules, layout)
    _check_targets(config, given, modules)
    kind: AdapterKind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    factors, ranks, magnitudes = _assembled(config, kind, given, modules)
    return Adapter(
        kind=kind,
        factors=factors,
        ranks=ranks,
        magnitudes=magnitudes,
        modules=_whole_parameters(whole, layout, model),
        base=config.get("base_model_name_or_path") or base.get("base", ""),
        base_hash=base.get("hash", ""),
        settings=config,
    )


def check_config(config: Mapping[str, Any]) -> None:
    """Checks that an adapter is of a kind that is read; raises AdapterError."""
    if virtual_token_files.kind_of(config) is not None:
        return
    if config.get("peft_type") != "LORA":
        raise AdapterError(
            f"peft_type is {config.get('peft_type')!r}; LORA (with rslora and dora), PREFIX_TUNING and PROMPT_TUNING "
            "are read here."
        )
    for name, value in config.items():
        if name in READ | WITHOUT_EFFECT or value is None or value is False or value in ({}, []):
            continue
        if name not in NEUTRAL or value not in NEUTRAL[name]:
            legal = f"; legal: {', '.join(map(repr, NEUTRAL[name]))}" if name in NEUTRAL else ""
            raise AdapterError(f"{CONFIG}: {name} = {value!r} is not supported{legal}.")
    ranks = {"r": config.get("r"), **(config.get("rank_pattern") or {})}
    for name, rank in ranks.items():
        if type(rank) is not int or rank < 1:
            raise AdapterError(f"{CONFIG}: the rank {name} = {rank!r}; give a positive number.")
    if config.get("use_dora") and config.get("use_rslora"):
        raise AdapterError(f"{CONFIG}: use_dora and use_rslora together are not supported.")


def read_base(folder: Path, base_hash: str = "") -> dict[str, str]:
    """Name and hash of an adapter's base, if they are known; raises AdapterError if the hash is not ``base_hash``."""
    file = folder / BASE
    if not file.exists():
        return {}
    try:
        base = json.loads(file.read_text())
        name, found = base["base"], base["hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"{BASE} is damaged: {error!r}; the adapter was not written completely.") from error
    if is_other_base(found, base_hash):
        raise AdapterError(
            f"the adapter was trained on another base: {name or 'a model'} with the hash {found}, this one has "
            f"{base_hash}. Load it on its own base, or delete {BASE} to use it on this one."
        )
    return {"base": name, "hash": found}


def _by_module(
    tensors: Mapping[str, np.ndarray], modules: Mapping[str, PeftModule], layout: Mapping[str, HFTensor]
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """(factors of each module, whole tensors) by name.

    Raises:
        AdapterError: a name that the model lacks.
    """
    given: dict[str, dict[str, np.ndarray]] = {}
    whole: dict[str, np.ndarray] = {}
    for key, tensor in tensors.items():
        found = LORA_KEY.fullmatch(key)
        if found is None:
            if key not in layout:
                raise AdapterError(
                    f"{WEIGHTS}: the model has no {key}.{closest(key, layout)} It is an adapter of another family, or "
                    "of a kind that is not supported."
                )
            whole[key] = tensor
            continue
        module, part = (found["dora"], "magnitude") if found["dora"] else (found["module"], found["part"])
        if module not in modules:
            why = "cannot be adapted here: it is no matmul of a block" if f"{module}.weight" in layout else "is unknown"
            raise AdapterError(f"{WEIGHTS}: the target {module} {why}.{closest(module, modules)}")
        given.setdefault(module, {})[part] = tensor
    return given, whole


def _check_targets(
    config: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]], modules: Mapping[str, PeftModule]
) -> None:
    """Checks that each targeted module has all its tensors; raises AdapterError."""
    wanted = module_targets(config, modules)
    if not wanted:
        raise AdapterError(
            f"{CONFIG}: target_modules = {config.get('target_modules')!r} match no module of this model."
        )
    if absent := sorted(wanted - given.keys()):
        raise AdapterError(
            f"{WEIGHTS} lacks the factors of {absent[0]} ({len(absent)} targets in all); it is incomplete."
        )
    if more := sorted(given.keys() - wanted):
        raise AdapterError(f"{WEIGHTS} has factors of {more[0]}, which target_modules in {CONFIG} leave out.")
    parts = {"lora_A", "lora_B"} | ({"magnitude"} if config.get("use_dora") else set())
    for module, tensors in given.items():
        if odd := sorted(parts ^ tensors.keys()):
            raise AdapterError(
                f"{WEIGHTS}: {module} has {', '.join(sorted(tensors))} but {odd[0]} is missing or too much."
            )


def _assembled(
    config: Mapping[str, Any],
    kind: AdapterKind,
    given: Mapping[str, Mapping[str, np.ndarray]],
    modules: Mapping[str, PeftModule],
) -> tuple[dict[str, LowRank], dict[str, tuple[int, ...]], dict[str, np.ndarray]]:
    """Factors, ranks and magnitudes by the paths of the model, layers stacked."""
    rows: dict[str, dict[int, tuple[np.ndarray, np.ndarray, float, np.ndarray | None]]] = {}
    shapes: dict[str, LinearShape] = {}
    for name, tensors in given.items():
        module, a, b = modules[name], tensors["lora_A"], tensors["lora_B"]
        rank = pattern_value(config.get("rank_pattern"), name, config["r"])
        alpha = pattern_value(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
        wanted = (rank, module.inputs), (module.outputs, rank)
        if (a.shape, b.shape) != wanted:
            raise AdapterError(
                f"{WEIGHTS}: {name} has factors {list(a.shape)} and {list(b.shape)}; this base with rank {rank} needs "
                f"{list(wanted[0])} and {list(wanted[1])}. It is an adapter of another base."
            )
        for what, tensor in tensors.items():
            if not np.isfinite(tensor.astype(np.float32)).all():
                raise AdapterError(f"{WEIGHTS}: {name} {what} holds values that are not finite; the file is damaged.")
        scale = alpha / (math.sqrt(rank) if kind == "rslora" else rank)
        norms = module.split_outputs(_magnitude(tensors["magnitude"], module, name)) if kind == "dora" else None
        for i, (one_a, one_b) in enumerate(zip(module.split_a(a), module.split_outputs(b), strict=True)):
            part = module.tensor.parts[i]
            shapes[part.path] = module.linears[i]
            rows.setdefault(part.path, {})[part.at[0]] = (one_a, one_b, scale, None if norms is None else norms[i])
    factors, ranks, magnitudes = {}, {}, {}
    for path, found in rows.items():
        factors[path], ranks[path] = _stacked(found, shapes[path])
        if kind == "dora":
            if len(found) < shapes[path].stack[0]:
                raise AdapterError(f"dora adapts {len(found)} of {shapes[path].stack[0]} layers of {path}; adapt all.")
            magnitudes[path] = np.stack([found[row][3] for row in sorted(found)])  # pyright: ignore
    return factors, ranks, magnitudes


def _magnitude(tensor: np.ndarray, module: PeftModule, name: str) -> np.ndarray:
    if tensor.shape != (module.outputs,):
        raise AdapterError(f"{WEIGHTS}: the magnitudes of {name} are {list(tensor.shape)}, not [{module.outputs}].")
    return tensor


def _stacked(
    found: Mapping[int, tuple[np.ndarray, np.ndarray, float, Any]], shape: LinearShape
) -> tuple[LowRank, tuple[int, ...]]:
    """Factors of all layers of a stack; layers without an adapter, or with a lower rank, have zeros."""
    (layers,) = shape.stack
    rank, dtype = max(a.shape[-1] for a, *_ in found.values()), next(iter(found.values()))[0].dtype
    inputs, outputs = shape.shape[: shape.contract], shape.shape[shape.contract :]
    a, b = np.zeros((layers, *inputs, rank), dtype), np.zeros((layers, rank, *outputs), dtype)
    for row, (own_a, own_b, _, _) in found.items():
        own = own_a.shape[-1]
        a[row, ..., :own], b[row, :own] = own_a, own_b
    scales = [found[row][2] if row in found else 0.0 for row in range(layers)]
    ranks = tuple(found[row][0].shape[-1] if row in found else 0 for row in range(layers))
    alike = set(scales)
    return LowRank(a, b, alike.pop() if len(alike) == 1 else np.asarray(scales)), ranks


def _whole_parameters(
    whole: Mapping[str, np.ndarray], layout: Mapping[str, HFTensor], model: Functional
) -> dict[str, np.ndarray]:
    """Whole parameters by path, from tensors by name."""
    leaves, found, rows = leaves_by_path(model.abstract()), {}, {}
    for name, tensor in whole.items():
        if tuple(tensor.shape) != layout[name].shape:
            wanted = list(layout[name].shape)
            raise AdapterError(f"{WEIGHTS}: {name} has shape {list(tensor.shape)}, the base {wanted}: another base.")
        for part in layout[name].parts:
            value = found.setdefault(part.path, np.zeros(leaves[part.path].shape, tensor.dtype))
            value[part.at] = part.read(tensor, (slice(None),) * len(part.shape))
            rows[part.path] = rows.get(part.path, 0) + 1
    for path in found:
        parts = sum(part.path == path for tensor in layout.values() for part in tensor.parts)
        if rows[path] < parts:
            raise AdapterError(f"{WEIGHTS} replaces {rows[path]} of {parts} layers of {path}; replace all or none.")
    return found


def _written_module(
    module: PeftModule, adapter: Adapter
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, float] | None:
    """``lora_A``, ``lora_B``, magnitudes and scale of a module; None if no weight in it is adapted."""
    parts = module.tensor.parts
    row = parts[0].at[0]
    ranks = [adapter.ranks.get(part.path, (0,) * (row + 1))[row] for part in parts]
    if not any(ranks):
        return None
    a_s, b_s, scales = [], [], []
    for part, rank, shape in zip(parts, ranks, module.linears, strict=True):
        one = adapter.factors.get(part.path)
        if one is None:
            dtype = next(iter(adapter.factors.values())).a.dtype
            a_s.append(np.zeros((*shape.shape[: shape.contract], 0), dtype))
            b_s.append(np.zeros((0, *shape.shape[shape.contract :]), dtype))
            scales.append(0.0)
            continue
        a_s.append(np.asarray(one.a[row])[..., :rank])
        b_s.append(np.asarray(one.b[row])[:rank])
        scales.append(float(one.scale) if np.ndim(one.scale) == 0 else float(one.scale[row]))
    a_s, b_s = module.join_a(a_s), module.join_outputs(b_s)
    scale = next(s for s, rank in zip(scales, ranks, strict=True) if rank)
    magnitude = None
    if adapter.kind == "dora":
        if lost := [part.path for part in parts if part.path not in adapter.magnitudes]:
            raise AdapterError(f"{lost[0]} has no magnitudes, but shares a module with weights that do; target all.")
        norms = [np.asarray(adapter.magnitudes[part.path][row]) for part in parts]
        magnitude = np.ascontiguousarray(np.concatenate(module.join_outputs(norms)))
    if len(set(ranks)) == len(set(scales)) == 1 and all(np.array_equal(a_s[0], a) for a in a_s[1:]):
        return np.ascontiguousarray(a_s[0]), np.ascontiguousarray(np.concatenate(b_s)), magnitude, scale
    b = np.zeros((module.outputs, sum(ranks)), b_s[0].dtype)
    top = left = 0
    for own, rank, own_scale in zip(b_s, ranks, scales, strict=True):
        b[top : top + own.shape[0], left : left + rank] = own * (own_scale / scale)
        top, left = top + own.shape[0], left + rank
    return np.ascontiguousarray(np.concatenate(a_s)), b, magnitude, scale


def _config(
    adapter: Adapter,
    modules: Mapping[str, PeftModule],
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    layout: Mapping[str, HFTensor],
) -> dict[str, Any]:
    """``adapter_config.json`` of an adapter that was trained here."""
    if not ranks:
        raise AdapterError("the adapter has no low-rank factors; there is nothing to write.")

    def common(values: Iterable[Any]) -> Any:
        values = list(values)
        return max(set(values), key=lambda one: (values.count(one), one))

    def number(x: float) -> float | int:
        return round(x) if math.isclose(x, round(x), rel_tol=1e-12) else x

    short = {name.rpartition(".")[2] for name in ranks}
    by_name = {name for name in modules if name.rpartition(".")[2] in short}
    r, alpha = common(ranks.values()), common(map(number, alphas.values()))
    whole = sorted(
        name.rpartition(".")[0] for name, t in layout.items() if all(p.path in adapter.modules for p in t.parts)
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base or None,
        "inference_mode": True,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": adapter.kind == "rslora",
        "use_dora": adapter.kind == "dora",
        "target_modules": sorted(short if by_name == set(ranks) else ranks),
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != r},
        "alpha_pattern": {name: number(one) for name, one in alphas.items() if number(one) != alpha},
        "modules_to_save": whole or None,
        "init_lora_weights": True,
        # Else peft would leave the output matrix of a tied model as it was.
        "ensure_weight_tying": "embedding/table" in adapter.modules and "lm_head.weight" not in layout,
    }


def _axes(part: TensorPart, shape: LinearShape, inputs: bool) -> tuple[int, ...]:
    """Dimensions of a weight's inputs or outputs, in the order in which they are merged in the HF tensor."""
    wanted = range(shape.contract) if inputs else range(shape.contract, len(shape.shape))
    return tuple(dim for group in part.piece.groups for dim in group if dim in wanted)


def _grouped(array: np.ndarray, part: TensorPart, shape: LinearShape, inputs: bool) -> np.ndarray:
    """``[r, i]`` as ``[*in, r]``, or ``[*r, o]`` as ``[*r, *out]``."""
    dims = _axes(part, shape, inputs)
    lead = array.ndim - 1
    split = array.reshape(*array.shape[:-1], *(shape.shape[dim] for dim in dims))
    ordered = split.transpose(*range(lead), *(lead + i for i in np.argsort(dims)))
    return np.moveaxis(ordered, 0, -1) if inputs else ordered


def _flat(array: np.ndarray, part: TensorPart, shape: LinearShape, inputs: bool) -> np.ndarray:
    """Inverse of ``_grouped``."""
    dims = _axes(part, shape, inputs)
    array = np.moveaxis(array, -1, 0) if inputs else array
    lead = array.ndim - len(dims)
    first = min(dims)
    order = (*range(lead), *(lead + dim - first for dim in dims))
    return array.transpose(order).reshape(*array.shape[:lead], -1)

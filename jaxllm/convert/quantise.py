"""Quantises a published model, a group of blocks at a time, and writes it as compressed-tensors.

Rows of text go through the model in float, block by block: a block's statistics are recorded, its matrices are rounded,
and its outputs, with the rounded matrices, are the next block's inputs. In memory are one block, the rows' hidden
states and one matrix's statistics. What is finished is kept beside the output, so that a run that was stopped goes on.

Legend: I inputs, O outputs, E experts.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.convert.convert import copy_tokenizer_files
from jaxllm.convert.group_smoothing import smooth_group
from jaxllm.convert.quantise_config import QuantiseConfig
from jaxllm.files import write_json
from jaxllm.hub import safetensors
from jaxllm.hub.compressed_tensors import METHOD
from jaxllm.hub.errors import HubError
from jaxllm.hub.families.families import family
from jaxllm.hub.huggingface import leaves_by_path, match_tensors, sources_by_leaf, write_config
from jaxllm.hub.model_source import ModelSource
from jaxllm.hub.weight_mapping import HFTensor, TensorPart
from jaxllm.models import BlockConfig, functional
from jaxllm.quant.bit_allocation import BUDGET_BITS, Key, LayerErrors, bits_of_matrices
from jaxllm.quant.grids import GridParams
from jaxllm.quant.input_statistics import BlockRecorder, CalibrationError, InputStatistics, calibration_rows, leaf_path
from jaxllm.quant.methods.nearest import round_to_nearest, spread
from jaxllm.quant.methods.rounding_table import METHODS

REPORT = "quantisation.json"
BITS = "bits.json"


class MatrixReport(NamedTuple):
    """Errors of a matrix after rounding.

    Attributes:
        name: path within the model.
        error: squared error of its results over their squares, for the calibration rows; of its values without rows.
        nearest: the same, rounded to the nearest.
        remark: what there is to say.
        bits: bits of its codes; of experts with bits of their own the most.
    """

    name: str
    error: float
    nearest: float
    remark: str
    bits: int


@dataclass
class QuantiseReport:
    """Result of a quantisation."""

    directory: Path
    matrices: list[MatrixReport] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0


Progress = Callable[[str, int, int], None]


def quantise(
    source: ModelSource,
    out: Path,
    config: QuantiseConfig,
    ids: Sequence[int] = (),
    progress: Progress | None = None,
) -> QuantiseReport:
    """Writes the model with the matrices of its blocks in integer codes.

    Args:
        source: the model.
        out: new directory.
        config: method and codes.
        ids: tokens of the calibration text, for methods that want one.
        progress: called for every group of blocks.

    Raises:
        HubError: the directory exists, or the model cannot be quantised; says why.
        CalibrationError: the text is too short.
    """
    if out.exists():
        raise HubError(f"{out} exists; give a new directory.")
    return _Quantiser(source, out, config, ids).run(progress)


class _Quantiser:
    def __init__(self, source: ModelSource, out: Path, config: QuantiseConfig, ids: Sequence[int]):
        self.source, self.out, self.config, self.method = source, out, config, METHODS[config.method]
        self.model = functional(source.config)
        dtype = "float32" if source.format == "gguf" else _stored_dtype(source)
        scale_dtype = dtype if config.layout == METHOD else "float16"
        self.dtype, self.scale_dtype = dtype, config.scale_dtype(scale_dtype)
        self.bits: dict[Key, int] = {}
        self.group = config.inputs_of_group
        leaves = leaves_by_path(self.model.abstract())
        table = family(source.source).table
        self.found, self.carried = match_tensors(table, source.config, leaves, source.tensors)
        self.by_leaf = sources_by_leaf(self.found, source.tensors)
        self.contracted = {
            path: count
            for path, count in leaves_by_path(self.model.contracted()).items()
            if count and (not config.only or self._experts(path))
        }
        if not self.contracted:
            raise HubError("experts alone are to be quantised, and the model has none; leave --only out.")
        for path in self.contracted:
            _, part = self.by_leaf[path][0]
            if len(part.piece.groups) != 2 or part.piece.groups[1] != tuple(range(self._inner(path))) or part.step != 1:
                raise HubError(f"{path} is not stored as [outputs, inputs], and the format has no other order.")
        sizes = {path: self._inputs(path) for path in self.contracted}
        if self.group is not None and (odd := [path for path, size in sizes.items() if size % self.group]):
            whole = math.gcd(*sizes.values())
            legal = [str(n) for n in (16, 32, 64, 128, 256, 512) if whole % n == 0] or [str(whole)]
            raise HubError(
                f"{odd[0]} has {sizes[odd[0]]} inputs, which groups of {self.group} do not divide, as other libraries "
                f"ask; groups that divide all matrices: {', '.join(legal)}."
            )
        calibrates = self.method.calibrates
        self.tokens = calibration_rows(ids, config.rows, config.length) if calibrates else None
        self.work = out.with_name(out.name + ".partial")
        self.report = QuantiseReport(out)

    def run(self, progress: Progress | None) -> QuantiseReport:
        self._open_work()
        recorder = BlockRecorder(self.model)
        if self.config.budget:
            self._allocate(recorder)
        hidden = None if self.tokens is None else recorder.embed(self._ends(), self.tokens)
        total, first = sum(repeats for _, repeats in self.source.config.segments), 0
        done = 0
        for s, (group, repeats) in enumerate(self.source.config.segments):
            for row in range(repeats):
                if progress is not None:
                    progress(
                        f"layers {first} to {first + len(group) - 1}" if len(group) > 1 else f"layer {first}",
                        done,
                        total,
                    )
                kept = self.work / f"{done:04d}"
                params = self._group(s, row) if hidden is not None or not kept.exists() else None
                if not kept.exists():
                    params = self._quantise_group(recorder, s, row, group, params, hidden, first, kept)
                elif params is not None:
                    params = self._rounded(s, row, kept, params)
                self.report.matrices += [MatrixReport(*one) for one in json.loads((kept / REPORT).read_text())]
                if hidden is not None:
                    hidden, _ = recorder.run(s, params, hidden, first, record=False)
                first, done = first + len(group), done + 1
        self._write()
        shutil.rmtree(self.work)
        return self.report

    def _open_work(self) -> None:
        """The folder of what is finished; one of another model, text or setting is refused."""
        text = b"" if self.tokens is None else self.tokens.tobytes()
        mark = {
            "config": asdict(self.config),
            "model": dict(self.source.source),
            "text": hashlib.sha256(text).hexdigest(),
        }
        file = self.work / "run.json"
        if file.exists() and json.loads(file.read_text()) != json.loads(json.dumps(mark)):
            raise HubError(f"{self.work} is of another model, text or setting; remove it, or finish it first.")
        self.work.mkdir(parents=True, exist_ok=True)
        write_json(file, mark)

    def _ends(self) -> Any:
        """Parameters outside of blocks that the embedding takes."""
        tree = self.model.abstract()["embedding"]
        return {
            "embedding": jax.tree.map_with_path(
                lambda path, leaf: self._leaf(f"embedding/{leaf_path(path)}", leaf), tree
            )
        }

    def _leaf(self, path: str, leaf: Any, row: int | None = None) -> np.ndarray:
        """Values of a leaf, or of one row of its layers, in compute dtype of the calibration."""
        shape = leaf.shape if row is None else leaf.shape[1:]
        value = np.empty(shape, np.float32)
        for tensor, part in self.by_leaf[path]:
            if row is None or part.at[0] == row:
                at = part.at if row is None else part.at[1:]
                value[at] = part.read(tensor, (slice(None),) * len(part.shape))
        if not np.isfinite(value).all():
            raise HubError(f"{path} holds values that are not finite; the file is damaged.")
        return value

    def _group(self, s: int, row: int) -> Any:
        """Parameters of a group of blocks."""
        prefix = f"segments/{s}"
        tree = self.model.abstract()["segments"][str(s)]
        return jax.tree.map_with_path(
            lambda path, leaf: jnp.asarray(self._leaf(f"{prefix}/{leaf_path(path)}", leaf, row)), tree
        )

    def _quantise_group(
        self,
        recorder: BlockRecorder,
        s: int,
        row: int,
        group: Sequence[BlockConfig],
        params: Any,
        hidden: Any,
        first: int,
        kept: Path,
    ) -> Any:
        """The group's parameters with rounded matrices, whose tensors are written."""
        seen: dict[str, InputStatistics] = {}
        if hidden is not None:
            _, seen = recorder.run(s, params, hidden, first, record=True)
        flat = leaves_by_path(params)
        if self.method.smooths:
            flat, seen = self._smooth(group, s, row, flat, seen)
        reports, chosen = [], {}
        for path in flat:
            whole = f"segments/{s}/{path}"
            if whole not in self.contracted:
                continue
            flat[path], chosen[whole], report = self._quantise_matrix(whole, flat[path], seen.get(path), row)
            reports.append(report)
        tensors = {}
        for name, tensor in self.found.items():
            mine = [part for part in tensor.parts if part.path.startswith(f"segments/{s}/") and part.at[0] == row]
            if mine:
                tensors |= self._tensors(name, tensor, mine, flat, chosen, f"segments/{s}/")
        with safetensors.hub_directory(kept) as temporary:
            safetensors.write_shards(temporary, tensors, 2**40)
            write_json(temporary / REPORT, [list(report) for report in reports])
        return jax.tree.unflatten(jax.tree.structure(params), [flat[path] for path in flat])

    def _quantise_matrix(
        self, path: str, weight: Any, seen: InputStatistics | None, row: int
    ) -> tuple[Any, list[tuple[np.ndarray, GridParams]], MatrixReport]:
        """(values that the codes stand for, codes and parameters of each expert or of the one matrix, report)."""
        inputs, matrices = self._inputs(path), self._matrices(path, weight)
        grids = [self._grid(path, row, e) for e in range(len(matrices))]
        bits = [grid.bits for grid in grids]
        remarks = [f"experts in {', '.join(map(str, bits))} bits"] if len(set(bits)) > 1 else []
        out, chosen, errors = [], [], np.zeros(3)
        for e, (matrix, grid) in enumerate(zip(matrices, grids, strict=True)):
            gram = None if seen is None else seen.gram[e] if self._experts(path) else seen.gram
            if gram is not None and not bool(jnp.isfinite(gram).all()):
                raise CalibrationError(
                    f"{path}[{row}]: the calibration text gives it inputs that are not finite; the model diverges on "
                    "this text, or its weights are damaged."
                )
            if gram is not None and not bool(jnp.any(gram)):
                gram, rounding = None, METHODS["rtn"].round
                remarks.append(f"expert {e} has no rows, rounded to the nearest")
            else:
                rounding = self.method.round
            codes, params, remark = rounding(matrix, gram, grid, self.group)
            remarks += [remark] * bool(remark)
            size = self.group or inputs
            dense = grid.decode(codes, spread(params, size, inputs))
            nearest = self._nearest(matrix, grid)
            errors += [_squared(x, gram) for x in (matrix - dense, matrix - nearest, matrix)]
            out.append(dense)
            chosen.append((np.asarray(codes), jax.tree.map(np.asarray, params)))
        whole = max(errors[2], np.finfo(np.float64).tiny)
        report = MatrixReport(f"{path}[{row}]", errors[0] / whole, errors[1] / whole, "; ".join(remarks), max(bits))
        return jnp.stack(out).reshape(weight.shape), chosen, report

    def _smooth(
        self, group: Sequence[BlockConfig], s: int, row: int, flat: dict[str, Any], seen: dict[str, InputStatistics]
    ) -> tuple[dict[str, Any], dict[str, InputStatistics]]:
        """Parameters and statistics after factors have moved from activations into weights."""

        def error(path: str, matrix: Any, gram: Any, factors: np.ndarray) -> float:
            wide = jnp.asarray(factors, jnp.float32)[:, None]
            grid = self._grid(f"segments/{s}/{path}", row)
            return float(_squared(matrix - self._nearest(matrix * wide, grid) / wide, gram))

        how = self.method.smooths
        flat, seen, shifted = smooth_group(group, self.source.config.norm, flat, seen, how, error)
        if how == "smoothquant_bias" and not shifted:
            raise HubError(
                "smoothquant_bias shifts inputs by biases, and no layer of this model has one where its input is made "
                "and where it is used (norms with a bias, or values and the output projection); choose smoothquant."
            )
        return flat, seen

    def _nearest(self, matrix: Any, grid: Any) -> Any:
        """The matrix rounded to the nearest."""
        codes, params = round_to_nearest(matrix, grid, self.group)
        return grid.decode(codes, spread(params, self.group or matrix.shape[0], matrix.shape[0]))

    def _grid(self, path: str, row: int, expert: int = 0, bits: int | None = None) -> Any:
        """Grid of the codes of a matrix, in the bits that it was given or in others."""
        return self.config.grid(self.scale_dtype, bits or self.bits.get(self._key(path, row, expert)))

    def _key(self, path: str, row: int, expert: int) -> Key:
        """Key of a matrix with bits of its own: of a layer; with experts alone that of each expert (EdgeMoE)."""
        return (path, row, expert) if self.config.only else (path, row)

    def _allocate(self, recorder: BlockRecorder) -> None:
        """Gives every matrix its bits, by the errors of rounding to the nearest.

        Rows go through the model in float for it. Bits are kept beside the finished blocks.
        """
        file = self.work / BITS
        if not file.exists():
            hidden = None if self.tokens is None else recorder.embed(self._ends(), self.tokens)
            found: dict[Key, LayerErrors] = {}
            first = 0
            for s, (group, repeats) in enumerate(self.source.config.segments):
                for row in range(repeats):
                    params, seen = self._group(s, row), {}
                    if hidden is not None:
                        hidden, seen = recorder.run(s, params, hidden, first, record=True)
                    for path, weight in leaves_by_path(params).items():
                        whole = f"segments/{s}/{path}"
                        if whole in self.contracted:
                            found |= self._errors_by_bits(whole, weight, seen.get(path), row)
                    first += len(group)
            experts: dict[tuple[Any, ...], list[Key]] = {}
            for key in found if self.config.only else ():
                experts.setdefault((str(key[0]).rpartition("/")[0], *key[1:]), []).append(key)
            together = [[self._key_of(part) for part in t.parts if part.at] for t in self.found.values()]
            rows = [
                [*key, n]
                for key, n in bits_of_matrices(found, [*together, *experts.values()], self.config.budget).items()
            ]
            write_json(file, rows)
        self.bits = {tuple(key): n for *key, n in json.loads(file.read_text())}

    def _key_of(self, part: TensorPart) -> Key:
        """Key of the matrix that a part of a file's tensor is; of a tensor of all experts that of the first."""
        return self._key(part.path, part.at[0], part.at[1] if len(part.at) > 1 else 0)

    def _errors_by_bits(self, path: str, weight: Any, seen: InputStatistics | None, row: int) -> dict[Key, LayerErrors]:
        """Errors of a matrix, over the squares of its results; of experts with bits of their own by expert.

        The errors of each expert count as often as tokens were routed to it.
        """
        matrices = self._matrices(path, weight)
        grams = [
            None if seen is None else seen.gram[e] if self._experts(path) else seen.gram for e in range(len(matrices))
        ]
        whole = sum(float(_squared(m, g)) for m, g in zip(matrices, grams, strict=True))
        whole = max(whole, np.finfo(np.float64).tiny)
        found: dict[Key, LayerErrors] = {}
        for e, (m, g) in enumerate(zip(matrices, grams, strict=True)):
            own = {
                n: float(_squared(m - self._nearest(m, self._grid(path, row, bits=n)), g)) / whole for n in BUDGET_BITS
            }
            key = self._key(path, row, e)
            before = found.get(key, LayerErrors(0, dict.fromkeys(BUDGET_BITS, 0.0)))
            found[key] = LayerErrors(before.weights + int(m.size), {n: before.error[n] + own[n] for n in BUDGET_BITS})
        return found

    def _matrices(self, path: str, weight: Any) -> Any:
        """Matrices [E, I, O] of the experts, or the one."""
        inputs = self._inputs(path)
        experts = weight.shape[0] if self._experts(path) else 1
        return weight.reshape(experts, inputs, -1)

    def _tensors(
        self,
        name: str,
        tensor: HFTensor,
        parts: Sequence[TensorPart],
        flat: Mapping[str, Any],
        chosen: Mapping[str, list[tuple[np.ndarray, GridParams]]],
        prefix: str,
    ) -> dict[str, np.ndarray]:
        """Tensors of a file that stand for one of the plain model."""
        if all(part.path in chosen for part in parts):
            pieces = [chosen[part.path][part.at[1] if len(part.at) > 1 else 0] for part in parts]
            codes = np.concatenate([codes.T for codes, _ in pieces])
            scale = np.concatenate([params.scale.T for _, params in pieces]).astype(jnp.dtype(self.scale_dtype))
            zero = np.concatenate([params.zero.T for _, params in pieces])
            return self.config.tensors(name, codes, scale, zero, self.bits.get(self._key_of(parts[0])))
        values = [part.piece.to_hf(np.asarray(flat[part.path.removeprefix(prefix)][part.at[1:]])) for part in parts]
        whole = values[0] if len(values) == 1 else np.concatenate(values, parts[0].axis)
        return {name: np.ascontiguousarray(whole).astype(jnp.dtype(self.dtype))}

    def _rounded(self, s: int, row: int, kept: Path, params: Any) -> Any:
        """Parameters of a group that was finished before, as its files have them."""
        from jaxllm.hub.quantised_checkpoints import dequantise_tensors

        stored = dequantise_tensors({"quantization_config": self._entry()}, safetensors.open_model(kept))
        flat = leaves_by_path(params)
        values = {path: np.array(value) for path, value in flat.items()}
        for name, tensor in self.found.items():
            for part in tensor.parts:
                if part.path.startswith(f"segments/{s}/") and part.at[0] == row:
                    path = part.path.removeprefix(f"segments/{s}/")
                    values[path][part.at[1:]] = part.read(stored[name], (slice(None),) * len(part.shape))
        return jax.tree.unflatten(jax.tree.structure(params), [jnp.asarray(values[path]) for path in flat])

    def _entry(self) -> dict[str, Any]:
        linear = {name.removesuffix(".weight") for name in self.source.tensors if name.endswith(".weight")}
        bits = {
            name.removesuffix(".weight"): self.bits[self._key_of(part)]
            for name, tensor in self.found.items()
            for part in tensor.parts[:1]
            if part.at and self._key_of(part) in self.bits
        }
        kept = {
            name.removesuffix(".weight")
            for name, tensor in self.found.items()
            if self.config.only and not all(part.path in self.contracted for part in tensor.parts)
        }
        return self.config.entry(sorted(linear), bits, sorted(kept & linear))

    def _write(self) -> None:
        """The finished model."""
        tensors: dict[str, Any] = {}
        for folder in sorted(self.work.iterdir()):
            if folder.is_dir():
                tensors |= safetensors.open_model(folder)
        of_blocks = {name for name, tensor in self.found.items() if tensor.parts[0].path.startswith("segments/")}
        others = {name: t for name, t in self.source.tensors.items() if name not in of_blocks}
        tensors |= {name: _in_dtype(tensor, self.dtype) for name, tensor in others.items()}
        source = {**self.source.source, "quantization_config": self._entry()}
        size = lambda ts: sum(int(np.prod(t.shape)) * t.dtype.itemsize for t in ts.values())  # noqa: E731
        self.report.bytes_before, self.report.bytes_after = size(self.source.tensors), size(tensors)
        with safetensors.hub_directory(self.out) as temporary:
            safetensors.write_shards(temporary, tensors, 5 * 2**30)
            write_config(temporary, source, self.dtype)
            if self.source.format == "hf":
                copy_tokenizer_files(self.source.path, temporary)
            else:
                self.source.tokenizer.save(temporary)
            report = [one._asdict() for one in self.report.matrices]
            write_json(temporary / REPORT, {"settings": asdict(self.config), "matrices": report})

    def _experts(self, path: str) -> bool:
        return "/experts/" in path

    def _inner(self, path: str) -> int:
        return self.contracted[path]

    def _inputs(self, path: str) -> int:
        part = self.by_leaf[path][0][1]
        return int(np.prod(part.shape[: self._inner(path)]))


def _squared(error: Any, gram: Any) -> Any:
    """Squared norm of the results of a matrix, or of its values without a Gram matrix of the inputs."""
    return jnp.sum(error * error) if gram is None else jnp.sum(error * (gram @ error))


def _stored_dtype(source: ModelSource) -> str:
    """Dtype of the model's floating-point tensors."""
    kinds = {str(tensor.dtype) for tensor in source.tensors.values()}
    return next((kind for kind in ("float32", "bfloat16", "float16") if kind in kinds), "float32")


def _in_dtype(tensor: Any, dtype: str) -> Any:
    return safetensors.LazyTensor(
        tuple(tensor.shape), jnp.dtype(dtype), lambda: np.asarray(tensor[:]).astype(jnp.dtype(dtype))
    )

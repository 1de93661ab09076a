"""Weight mapping: one declarative table per model family, for loading, export and their round trip.

An entry states which weights of this library make up one Hugging Face (HF) tensor, and how their dimensions group into
its dimensions: the groups ``((1, 2), (0,))`` for q[D, N, H] mean that the HF tensor is [N*H, D], with dimensions 1 and
2 merged, then 0. Both directions are views until a slice is copied. A fused tensor has several pieces, one after
another along an axis, or interleaved. Experts are one weight here; in HF files each expert may have its own tensors.

Legend: D embed, N query heads, K kv heads, H head dim, F mlp, V vocab, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxllm.models import DecoderConfig

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class WeightPiece:
    """Weight inside an HF tensor: its path, and how its dimensions group into those of the HF tensor."""

    path: str
    groups: Groups

    def from_hf(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """View of an HF array as a weight of ``shape``."""
        order = [dim for group in self.groups for dim in group]
        inverse = np.argsort(order)
        return array.reshape([shape[dim] for dim in order]).transpose(inverse)

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        """Array of a weight in the HF shape; a view if the memory layout allows it."""
        order = [dim for group in self.groups for dim in group]
        return array.transpose(order).reshape(self.hf_shape(array.shape))

    def hf_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """HF shape for a weight of ``shape``, without the dimension of the layers."""
        return tuple(math.prod(shape[dim] for dim in group) for group in self.groups)


@dataclass(frozen=True)
class WeightEntry:
    """Entry for one HF tensor: its name, with ``{layer}`` if each layer has one, and its pieces along ``axis``.

    With ``{expert}`` in the name, each expert has a tensor, and the pieces are those of one expert. Pieces follow one
    another, or are interleaved (``by_turns``): the first index of each, then the second of each.
    """

    name: str
    pieces: tuple[WeightPiece, ...]
    axis: int = 0
    by_turns: bool = False


def single_entry(name: str, path: str, groups: Groups) -> WeightEntry:
    """Entry for an HF tensor that is a single weight."""
    return WeightEntry(name, (WeightPiece(path, groups),))


@dataclass(frozen=True)
class WeightTable:
    """Weight table of a model family.

    Attributes:
        prefix: prefix of the names of the inner model; files saved from it alone lack it.
        layer: prefix of the names of a block's tensors, after ``prefix``.
        block: entries of a block, with paths within the block and HF names within a layer.
        whole: entries outside of blocks, with whole names.
        more_layers: True if files may have layers beyond the model's last, for multi-token prediction (MTP), which the
            model does not use (``jaxllm.infer.speculate.mtp_module`` drafts with them).
    """

    prefix: str
    layer: str
    block: tuple[WeightEntry, ...]
    whole: tuple[WeightEntry, ...]
    more_layers: bool = False

    def beyond(self, name: str, config: DecoderConfig) -> bool:
        """Whether the tensor of this name belongs to a layer beyond the model's last."""
        pattern = re.escape(self.layer).replace(re.escape("{layer}"), r"(\d+)")
        found = re.match(f"(?:{re.escape(self.prefix)})?{pattern}", name)
        return self.more_layers and found is not None and int(found[1]) >= config.layers

    def with_block(self, *entries: WeightEntry, without: tuple[str, ...] = ()) -> WeightTable:
        """This table with other entries for the weights that ``entries`` name, and none for those in ``without``."""
        changed = {piece.path for entry in entries for piece in entry.pieces} | set(without)
        kept = tuple(e for e in self.block if not changed & {piece.path for piece in e.pieces})
        return replace(self, block=(*kept, *entries))


VECTOR, MATRIX, SWAPPED = ((0,),), ((0,), (1,)), ((1,), (0,))
HEADS_OUT, HEADS_IN, HEADS = ((1, 2), (0,)), ((2,), (0, 1)), ((0, 1),)

LLAMA = WeightTable(
    prefix="model.",
    layer="layers.{layer}.",
    block=(
        single_entry("input_layernorm.weight", "attention_norm/gain", VECTOR),
        single_entry("self_attn.q_proj.weight", "attention/q", HEADS_OUT),
        single_entry("self_attn.k_proj.weight", "attention/k", HEADS_OUT),
        single_entry("self_attn.v_proj.weight", "attention/v", HEADS_OUT),
        single_entry("self_attn.o_proj.weight", "attention/o", HEADS_IN),
        single_entry("self_attn.q_proj.bias", "attention/q_bias", HEADS),
        single_entry("self_attn.k_proj.bias", "attention/k_bias", HEADS),
        single_entry("self_attn.v_proj.bias", "attention/v_bias", HEADS),
        single_entry("self_attn.o_proj.bias", "attention/o_bias", VECTOR),
        single_entry("self_attn.q_norm.weight", "attention/q_norm/gain", VECTOR),
        single_entry("self_attn.k_norm.weight", "attention/k_norm/gain", VECTOR),
        single_entry("post_attention_layernorm.weight", "mlp_norm/gain", VECTOR),
        single_entry("mlp.gate_proj.weight", "mlp/gate", SWAPPED),
        single_entry("mlp.up_proj.weight", "mlp/up", SWAPPED),
        single_entry("mlp.down_proj.weight", "mlp/down", SWAPPED),
        single_entry("mlp.gate_proj.bias", "mlp/gate_bias", VECTOR),
        single_entry("mlp.up_proj.bias", "mlp/up_bias", VECTOR),
        single_entry("mlp.down_proj.bias", "mlp/down_bias", VECTOR),
    ),
    whole=(
        single_entry("model.embed_tokens.weight", "embedding/table", MATRIX),
        single_entry("model.norm.weight", "head/norm/gain", VECTOR),
        single_entry("lm_head.weight", "head/weight", MATRIX),
    ),
)
"""The Llama line: Llama, SmolLM2, Mistral, Qwen2 (biases), Qwen3 (q and k norms)."""

GEMMA = LLAMA.with_block(
    single_entry("post_attention_layernorm.weight", "attention_out_norm/gain", VECTOR),
    single_entry("pre_feedforward_layernorm.weight", "mlp_norm/gain", VECTOR),
    single_entry("post_feedforward_layernorm.weight", "mlp_out_norm/gain", VECTOR),
)

OLMO2 = LLAMA.with_block(
    single_entry("self_attn.q_norm.weight", "attention/q_norm/gain", HEADS),
    single_entry("self_attn.k_norm.weight", "attention/k_norm/gain", HEADS),
    single_entry("post_attention_layernorm.weight", "attention_out_norm/gain", VECTOR),
    single_entry("post_feedforward_layernorm.weight", "mlp_out_norm/gain", VECTOR),
    without=("attention_norm/gain", "mlp_norm/gain"),
)


def experts(
    layer: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[WeightEntry, ...]:
    """Entries for the experts and the router of a layer called ``layer``."""
    names = ((gate, "gate"), (up, "up"), (down, "down"))
    each = (
        single_entry(f"{layer}.experts.{{expert}}.{hf_name}.weight", f"mlp/experts/{path}", SWAPPED)
        for hf_name, path in names
    )
    return single_entry(f"{layer}.gate.weight", "mlp/router", SWAPPED), *each


MIXTRAL = LLAMA.with_block(*experts("block_sparse_moe", "w1", "w3", "w2"))

QWEN3_MOE = LLAMA.with_block(*experts("mlp"))

SHARED = tuple(
    single_entry(f"mlp.shared_experts.{name}_proj.weight", f"mlp/shared/{name}", SWAPPED)
    for name in ("gate", "up", "down")
)

DEEPSEEK = LLAMA.with_block(
    single_entry("self_attn.q_proj.weight", "attention/q", HEADS_OUT),
    single_entry("self_attn.q_a_proj.weight", "attention/q_down", SWAPPED),
    single_entry("self_attn.q_a_proj.bias", "attention/q_bias", VECTOR),
    single_entry("self_attn.q_a_layernorm.weight", "attention/q_norm/gain", VECTOR),
    single_entry("self_attn.q_b_proj.weight", "attention/q_up", HEADS_OUT),
    single_entry("self_attn.kv_a_proj_with_mqa.weight", "attention/kv_down", SWAPPED),
    single_entry("self_attn.kv_a_proj_with_mqa.bias", "attention/kv_bias", VECTOR),
    single_entry("self_attn.kv_a_layernorm.weight", "attention/kv_norm/gain", VECTOR),
    single_entry("self_attn.kv_b_proj.weight", "attention/kv_up", HEADS_OUT),
    single_entry("mlp.gate.e_score_correction_bias", "mlp/balance_bias", VECTOR),
    *experts("mlp"),
    *SHARED,
)
DEEPSEEK = replace(DEEPSEEK, more_layers=True)
"""DeepSeek-V2 and V3. The layers after their last one predict further tokens (MTP) and are carried along."""

GLM4_MOE = replace(
    LLAMA.with_block(
        single_entry("mlp.gate.e_score_correction_bias", "mlp/balance_bias", VECTOR), *experts("mlp"), *SHARED
    ),
    more_layers=True,
)

STACKED = ((0,), (1,), (2,))
GPT_OSS = LLAMA.with_block(
    single_entry("self_attn.sinks", "attention/sinks", VECTOR),
    single_entry("mlp.router.weight", "mlp/router", SWAPPED),
    single_entry("mlp.router.bias", "mlp/router_bias", VECTOR),
    WeightEntry(
        "mlp.experts.gate_up_proj",
        (WeightPiece("mlp/experts/gate", STACKED), WeightPiece("mlp/experts/up", STACKED)),
        axis=2,
        by_turns=True,
    ),
    WeightEntry(
        "mlp.experts.gate_up_proj_bias",
        (WeightPiece("mlp/experts/gate_bias", MATRIX), WeightPiece("mlp/experts/up_bias", MATRIX)),
        axis=1,
        by_turns=True,
    ),
    single_entry("mlp.experts.down_proj", "mlp/experts/down", STACKED),
    single_entry("mlp.experts.down_proj_bias", "mlp/experts/down_bias", MATRIX),
)
"""gpt-oss: all experts in one tensor, with gate and up columns interleaved."""

OLMOE = QWEN3_MOE.with_block(
    single_entry("self_attn.q_norm.weight", "attention/q_norm/gain", HEADS),
    single_entry("self_attn.k_norm.weight", "attention/k_norm/gain", HEADS),
)

PHI3 = LLAMA.with_block(
    WeightEntry(
        "self_attn.qkv_proj.weight",
        (
            WeightPiece("attention/q", HEADS_OUT),
            WeightPiece("attention/k", HEADS_OUT),
            WeightPiece("attention/v", HEADS_OUT),
        ),
    ),
    WeightEntry("mlp.gate_up_proj.weight", (WeightPiece("mlp/gate", SWAPPED), WeightPiece("mlp/up", SWAPPED))),
)

# GPT-2 stores its projections as [in, out].
GPT2 = WeightTable(
    prefix="transformer.",
    layer="h.{layer}.",
    block=(
        single_entry("ln_1.weight", "attention_norm/gain", VECTOR),
        single_entry("ln_1.bias", "attention_norm/bias", VECTOR),
        WeightEntry(
            "attn.c_attn.weight",
            tuple(WeightPiece(f"attention/{name}", ((0,), (1, 2))) for name in ("q", "k", "v")),
            axis=1,
        ),
        WeightEntry(
            "attn.c_attn.bias", tuple(WeightPiece(f"attention/{name}_bias", HEADS) for name in ("q", "k", "v"))
        ),
        single_entry("attn.c_proj.weight", "attention/o", ((0, 1), (2,))),
        single_entry("attn.c_proj.bias", "attention/o_bias", VECTOR),
        single_entry("ln_2.weight", "mlp_norm/gain", VECTOR),
        single_entry("ln_2.bias", "mlp_norm/bias", VECTOR),
        single_entry("mlp.c_fc.weight", "mlp/up", MATRIX),
        single_entry("mlp.c_fc.bias", "mlp/up_bias", VECTOR),
        single_entry("mlp.c_proj.weight", "mlp/down", MATRIX),
        single_entry("mlp.c_proj.bias", "mlp/down_bias", VECTOR),
    ),
    whole=(
        single_entry("transformer.wte.weight", "embedding/table", MATRIX),
        single_entry("transformer.wpe.weight", "embedding/positions", MATRIX),
        single_entry("transformer.ln_f.weight", "head/norm/gain", VECTOR),
        single_entry("transformer.ln_f.bias", "head/norm/bias", VECTOR),
        single_entry("lm_head.weight", "head/weight", MATRIX),
    ),
)


@dataclass(frozen=True)
class TensorPart:
    """Location of one weight, in one layer, within an HF tensor.

    Attributes:
        path: path of the weight's leaf.
        at: part of the leaf: (row of the stack of layers), (row, expert), or () for all of it.
        shape: shape of that part.
        piece: grouping of its dimensions.
        begin: first index along ``axis`` of the HF tensor.
        axis: axis of the HF tensor.
        step: distance between indices along ``axis``.
    """

    path: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    piece: WeightPiece
    begin: int
    axis: int
    step: int = 1

    def __str__(self) -> str:
        return self.path + "".join(f"[{i}]" for i in self.at)

    def read(self, tensor: Any, inner: tuple[slice, ...]) -> np.ndarray:
        """Reads the slice ``inner`` of the weight; only the rows of the HF tensor that contain it are read."""
        first = self.piece.groups[0][0]  # the weight's dimension that is outermost in the HF tensor
        span = range(*inner[first].indices(self.shape[first]))
        size = self.piece.hf_shape(self.shape)
        each = size[0] // self.shape[first]
        spans = [(span.start * each, span.stop * each), *((0, n) for n in size[1:])]
        place = tuple(self._along(axis, *span) for axis, span in enumerate(spans))
        shape = (*self.shape[:first], len(span), *self.shape[first + 1 :])
        rest = (*inner[:first], slice(None), *inner[first + 1 :])
        return self.piece.from_hf(np.asarray(tensor[place]), shape)[rest]

    def _along(self, axis: int, start: int, stop: int) -> slice:
        """Indices of the piece along an axis of the HF tensor."""
        if axis != self.axis:
            return slice(start, stop)
        last = self.begin + (stop - 1) * self.step + 1
        return slice(self.begin + start * self.step, last, None if self.step == 1 else self.step)


@dataclass(frozen=True)
class HFTensor:
    """HF tensor of a model: its shape, and the weights in it, in order."""

    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]


def hf_layout(
    table: WeightTable, config: DecoderConfig, leaves: Mapping[str, Any], *, bare: bool = False
) -> dict[str, HFTensor]:
    """HF tensors by name, for a model with these ``leaves`` (path -> array or shape).

    Args:
        bare: whether names lack the table's prefix.

    Raises:
        ValueError: the table has no place for a leaf: the architecture is not of this family.
    """
    out: dict[str, HFTensor] = {}
    for entry, within, at, layer in _entries(table, config):
        path = f"{within}{entry.pieces[0].path}"
        if path not in leaves:
            continue
        places = [(*at, e) for e in range(leaves[path].shape[1])] if "{expert}" in entry.name else [at]
        for place in places:
            name = entry.name.format(layer=layer, expert=place[-1] if place else None)
            out[name.removeprefix(table.prefix) if bare else name] = _hf_tensor(entry, within, place, leaves)
    placed = {part.path for tensor in out.values() for part in tensor.parts}
    if lost := sorted(set(leaves) - placed):
        raise ValueError(f"the weight table has no entry for {', '.join(lost[:5])}.")
    return out


def _entries(
    table: WeightTable, config: DecoderConfig
) -> Iterator[tuple[WeightEntry, str, tuple[int, ...], int | None]]:
    """(entry with its whole name, prefix of the leaf paths, row of the stack of layers, layer) of all entries."""
    yield from ((entry, "", (), None) for entry in table.whole)
    layer = 0
    for s, (group, repeats) in enumerate(config.segments):
        for row in range(repeats):
            for slot in range(len(group)):
                for entry in table.block:
                    whole = replace(entry, name=table.prefix + table.layer + entry.name)
                    yield whole, f"segments/{s}/{slot}/", (row,), layer
                layer += 1


def _hf_tensor(entry: WeightEntry, within: str, at: tuple[int, ...], leaves: Mapping[str, Any]) -> HFTensor:
    parts: list[TensorPart] = []
    begin, shape, step = 0, (), len(entry.pieces) if entry.by_turns else 1
    for number, piece in enumerate(entry.pieces):
        path = within + piece.path
        own_shape = tuple(leaves[path].shape[len(at) :])
        shape = piece.hf_shape(own_shape)
        parts.append(TensorPart(path, at, own_shape, piece, number if entry.by_turns else begin, entry.axis, step))
        begin += shape[entry.axis]
    return HFTensor((*shape[: entry.axis], begin, *shape[entry.axis + 1 :]), tuple(parts))

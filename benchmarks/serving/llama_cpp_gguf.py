"""A model of ``capped_memory`` as GGUF, for llama.cpp. Run by another interpreter, with gguf.

    PYTHON llama_cpp_gguf.py FOLDER TOKENIZER.gguf

Reads config.json and the safetensors of transformers in the folder, and writes gguf/model.gguf there, matrices in
Q8_0, with the tokenizer of another GGUF. Rows of queries and keys are not reordered as llama.cpp's rotary embedding
would have them: only the speed counts. No module but this interpreter's is imported.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file in bfloat16, as uint16 views of the file."""
    data = np.memmap(path, np.uint8, "r")
    (size,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    found = {}
    for name, one in header.items():
        begin, end = (8 + size + n for n in one["data_offsets"])
        found[name] = data[begin:end].view(np.uint16).reshape(one["shape"])
    return found


def full(x: np.ndarray) -> np.ndarray:
    """A bfloat16 array in float32."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def main() -> None:
    """Writes the file."""
    import gguf  # pyright: ignore[reportMissingImports]

    folder, words = Path(sys.argv[1]), gguf.GGUFReader(sys.argv[2])
    config, found = json.loads((folder / "config.json").read_text()), tensors(folder / "model.safetensors")
    out = folder / "gguf" / "model.gguf"
    out.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(layers := config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    if experts := config.get("num_local_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    for name, field in words.fields.items():
        if name.startswith("tokenizer."):
            value, kind = field.contents(), field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, kind, sub_type=sub)

    def add(name: str, x: np.ndarray) -> None:
        if x.ndim == 1 or "gate_inp" in name:
            writer.add_tensor(name, x)
            return
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)

    for name, x in found.items():
        prefix, _, rest = name.removeprefix("model.layers.").partition(".")
        if name in NAMES:
            add(NAMES[name], full(x))
        elif rest in NAMES:
            add(f"blk.{prefix}.{NAMES[rest]}", full(x))
    for n in range(layers if experts else 0):
        moe = next(
            name.removesuffix(".gate.weight") for name in found if name.startswith(f"model.layers.{n}.")
            and name.endswith(".gate.weight")
        )  # fmt: skip
        add(f"blk.{n}.ffn_gate_inp.weight", full(found[f"{moe}.gate.weight"]))
        for one, there in EXPERTS.items():
            add(
                f"blk.{n}.{there}.weight",
                np.stack([full(found[f"{moe}.experts.{e}.{one}.weight"]) for e in range(experts)]),
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()

"""Foreign checkpoint: a training framework's checkpoint, opened as whole tensors under Hugging Face's names.

Fragment rules say how a framework's fragments become whole and what their parameters are called elsewhere. Those of
Megatron-Core's GPT, of torchtitan's Llama and of Hugging Face models in torch.distributed.checkpoint (DCP) are here;
other names need rules of their own. Optimizer states are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.foreign.fragment_rules import AttentionHeads, FragmentRule, parse_rules, rule_for
from jaxllm.checkpoint.foreign.megatron import megatron_fragments
from jaxllm.checkpoint.foreign.torch_archive import ArchiveTensor
from jaxllm.checkpoint.foreign.torch_dcp import METADATA, dcp_tensors

MEGATRON_RULES = """
*._extra_state                                                replicated -> nothing
embedding.word_embeddings.weight                              sharded 0, padded 0 to vocabulary -> model.embed_tokens.weight
output_layer.weight                                           sharded 0, padded 0 to vocabulary -> lm_head.weight
decoder.final_layernorm.weight                                replicated -> model.norm.weight
decoder.layers.*.input_layernorm.weight                       replicated -> model.layers.*.input_layernorm.weight
decoder.layers.*.self_attention.linear_qkv.layer_norm_weight  replicated -> model.layers.*.input_layernorm.weight
decoder.layers.*.self_attention.linear_qkv.*                  sharded 0 -> model.layers.*.self_attn.{q,k,v}_proj.* by query groups
decoder.layers.*.self_attention.linear_proj.weight            sharded 1 -> model.layers.*.self_attn.o_proj.weight
decoder.layers.*.self_attention.linear_proj.bias              replicated -> model.layers.*.self_attn.o_proj.bias
decoder.layers.*.self_attention.q_layernorm.weight            replicated -> model.layers.*.self_attn.q_norm.weight
decoder.layers.*.self_attention.k_layernorm.weight            replicated -> model.layers.*.self_attn.k_norm.weight
decoder.layers.*.pre_mlp_layernorm.weight                     replicated -> model.layers.*.post_attention_layernorm.weight
decoder.layers.*.mlp.linear_fc1.layer_norm_weight             replicated -> model.layers.*.post_attention_layernorm.weight
decoder.layers.*.mlp.linear_fc1.*                             sharded 0 groups 2 -> model.layers.*.mlp.{gate,up}_proj.*
decoder.layers.*.mlp.linear_fc2.weight                        sharded 1 -> model.layers.*.mlp.down_proj.weight
decoder.layers.*.mlp.linear_fc2.bias                          replicated -> model.layers.*.mlp.down_proj.bias
"""  # noqa: E501
"""Rules of Megatron-Core's GPT with gated feed-forward layers and RMSNorm."""

DCP_RULES = """
optim*                              placed -> nothing
lr_scheduler*                       placed -> nothing
dataloader*                         placed -> nothing
train_state*                        placed -> nothing
freqs_cis                           placed -> nothing
tok_embeddings.weight               placed, padded 0 to vocabulary -> model.embed_tokens.weight
output.weight                       placed, padded 0 to vocabulary -> lm_head.weight
norm.weight                         placed -> model.norm.weight
layers.*.attention_norm.weight      placed -> model.layers.*.input_layernorm.weight
layers.*.ffn_norm.weight            placed -> model.layers.*.post_attention_layernorm.weight
layers.*.attention.wq.weight        placed -> model.layers.*.self_attn.q_proj.weight by rotary pairs
layers.*.attention.wk.weight        placed -> model.layers.*.self_attn.k_proj.weight by rotary pairs
layers.*.attention.wv.weight        placed -> model.layers.*.self_attn.v_proj.weight
layers.*.attention.wo.weight        placed -> model.layers.*.self_attn.o_proj.weight
layers.*.feed_forward.w1.weight     placed -> model.layers.*.mlp.gate_proj.weight
layers.*.feed_forward.w3.weight     placed -> model.layers.*.mlp.up_proj.weight
layers.*.feed_forward.w2.weight     placed -> model.layers.*.mlp.down_proj.weight
model.model.*                       placed -> model.*
model.lm_head.*                     placed -> lm_head.*
*                                   placed
"""
"""Rules of torchtitan's Llama, whose rotary embedding rotates neighbours, and of models with Hugging Face's names."""


def is_foreign(folder: Path) -> bool:
    """Whether a folder is a checkpoint that ``open_foreign`` reads."""
    return (folder / METADATA).is_file() or any(folder.glob("mp_rank_*"))


def open_foreign(
    folder: Path, vocabulary: int, heads: AttentionHeads | None, rules: str | None = None
) -> Mapping[str, ArchiveTensor]:
    """Whole tensors of a foreign checkpoint under the names that its rules give them; each is read when it is used.

    Args:
        folder: with ``mp_rank_...`` of Megatron, or with ``.metadata`` of DCP.
        vocabulary: size of the vocabulary without padding.
        heads: of the model's attention; None: it has no plain heads.
        rules: their text; None: those of the framework.

    Raises:
        CheckpointError: the folder is neither, a file is missing or damaged, a name has no rule, or two have one name.
    """
    dcp = (folder / METADATA).is_file()
    if not dcp and not is_foreign(folder):
        raise CheckpointError(f"{folder} has neither {METADATA} (of DCP) nor mp_rank_... (of Megatron).")
    fragments = {name: [one] for name, one in dcp_tensors(folder).items()} if dcp else megatron_fragments(folder)
    known = DCP_RULES if dcp else MEGATRON_RULES
    chosen = parse_rules(known if rules is None else rules, vocabulary)

    @functools.lru_cache(maxsize=1)  # the parts of a fused array, and its rows, are read one after the other
    def parts(name: str, rule: FragmentRule) -> list[np.ndarray]:
        return rule.split(name, rule.whole(name, [one.read() for one in fragments[name]]), heads)

    out: dict[str, ArchiveTensor] = {}
    for name, own in fragments.items():
        rule = rule_for(name, chosen)
        names = rule.names_of(name)
        if not names:
            continue
        shape = rule.whole_shape([one.shape for one in own])
        dummy = np.broadcast_to(np.zeros((), np.bool_), shape)  # takes no memory
        shapes = [part.shape for part in rule.split(name, dummy, heads)]
        for place, (target, own_shape) in enumerate(zip(names, shapes, strict=True)):
            if target in out:
                raise CheckpointError(f"{folder}: {name} becomes {target}, and so does another parameter.")
            read = functools.partial(lambda name, rule, place: parts(name, rule)[place], name, rule, place)
            out[target] = ArchiveTensor(own_shape, own[0].dtype, read)
    return out

"""Mixtral pretraining (arXiv:2401.04088): the architecture as released, from random weights.

    jaxllm train mixtral_8x22b --data.source tokens.bin --data.tokenizer path/to/tokenizer.json

Tables as in recipes/llama3.py. Not run at this size; the training step was compiled.
"""

from jaxllm.models import AttentionConfig, BlockConfig, MoeConfig, RopeConfig
from jaxllm.train import RunConfig
from recipes._pretraining import decoder, pretraining


def mixtral_8x22b() -> RunConfig:
    """141B parameters, 39B active per token; 8-way expert parallelism, one expert per device group.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v5p:4x8x8   |  4.485 |  48.2 | 21.1 |     21.2 |  95.7 |
    | v6e:16x16   |  3.607 |  30.0 | 21.1 |     21.1 |  31.2 |
    | tpu7x:4x4x8 |  2.809 |  30.6 | 21.7 |     22.3 |  94.7 |
    | h100:32x8   |  4.919 |  20.4 | 15.0 |     15.1 |  79.1 |
    | h200:32x8   |  4.818 |  20.8 | 15.0 |        - | 141.0 |
    """
    attention = AttentionConfig(heads=48, kv_heads=8, head_dim=128, rope=RopeConfig(theta=1_000_000.0))
    model = decoder(32_768, 6144, 56, BlockConfig(attention, MoeConfig(experts=8, top_k=2, hidden=16384)))
    return pretraining("mixtral_8x22b", model, seq_len=4096, rows=256, peak=2e-4, mesh="fsdp=32,expert=8")

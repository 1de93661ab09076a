"""Qwen3 mixture-of-experts pretraining (arXiv:2505.09388): the architectures as released, from random weights.

    jaxllm train qwen3_30b_a3b --data.source tokens.bin --data.tokenizer path/to/tokenizer.json

Tables as in recipes/llama3.py. Not run at these sizes; the training steps were compiled.
"""

from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MoeConfig, RopeConfig
from jaxllm.train import RoutingConfig, RunConfig
from recipes._pretraining import decoder, pretraining


def qwen3_30b_a3b() -> RunConfig:
    """30.5B parameters, 3.3B active per token; FSDP, predicted faster than expert parallelism.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v5p:4x4x4   |  1.195 |  34.5 | 19.1 |     19.8 |  95.7 |
    | v6e:8x8     |  1.951 |  10.6 | 19.1 |        - |  31.2 |
    | tpu7x:2x4x4 |  1.627 |  10.1 | 19.9 |        - |  94.7 |
    | h100:8x8    |  0.951 |  20.1 | 16.8 |     19.6 |  79.1 |
    | h200:8x8    |  0.903 |  21.2 | 16.8 |        - | 141.0 |
    """
    return _qwen3("qwen3_30b_a3b", 2048, 48, 32, 768, rows=128, mesh="fsdp", peak=4e-4)


def qwen3_235b_a22b() -> RunConfig:
    """235B parameters, 22B active per token; 8-way expert parallelism with 16 experts per device group.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v5p:4x8x8   |  5.181 |  25.5 | 28.2 |     28.6 |  95.7 |
    | tpu7x:4x4x8 |  5.449 |   9.7 | 29.6 |        - |  94.7 |
    | h100:32x8   |  7.029 |   8.7 | 27.7 |        - |  79.1 |
    | h200:32x8   |  6.835 |   9.0 | 27.7 |        - | 141.0 |
    """
    return _qwen3("qwen3_235b_a22b", 4096, 94, 64, 1536, rows=256, mesh="fsdp=32,expert=8", peak=2e-4)


def _qwen3(
    name: str, width: int, layers: int, heads: int, hidden: int, *, rows: int, mesh: str, peak: float
) -> RunConfig:
    attention = AttentionConfig(
        heads=heads, kv_heads=4, head_dim=128, rope=RopeConfig(theta=1_000_000.0), qk_norm="head"
    )
    block = BlockConfig(attention, MoeConfig(experts=128, top_k=8, hidden=hidden))
    model: DecoderConfig = decoder(151_936, width, layers, block, norm_eps=1e-6)
    routing = RoutingConfig(balance_loss=1e-3)
    return pretraining(name, model, seq_len=4096, rows=rows, peak=peak, mesh=mesh, routing=routing)

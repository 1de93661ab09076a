"""GPT-2 124M pretraining from random weights, with GPT-3's batch and learning rate (arXiv:2005.14165, table 2.1).

    jaxllm train gpt2_124m --data.source tokens.bin --data.tokenizer path/to/tokenizer.json

Tables as in recipes/llama3.py. Run so far: the first steps of the architecture, with a small batch of short rows, on
two CPU cores (docs/curves.md).
"""

from jaxllm.models import AttentionConfig, BlockConfig, MlpConfig
from jaxllm.train import RunConfig
from recipes._pretraining import decoder, pretraining


def gpt2_124m() -> RunConfig:
    """124M parameters, half a million tokens per step, ten billion in all.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v5e:2x4     |  0.703 |  37.7 |  5.4 |      6.3 |  15.8 |
    | v6e:2x4     |  0.232 |  24.5 |  5.4 |      6.2 |  31.2 |
    | h100:1x8    |  0.158 |  33.5 |  4.9 |      9.2 |  79.1 |
    | h200:1x8    |  0.140 |  37.9 |  4.9 |        - | 141.0 |
    """
    attention = AttentionConfig(heads=12, kv_heads=12, head_dim=64, rope=None, bias="all")
    block = BlockConfig(attention, MlpConfig(3072, "gelu_tanh", gated=False, bias=True))
    model = decoder(50_257, 768, 12, block, tied=True, learned_positions=1024, norm="layer")
    return pretraining("gpt2_124m", model, seq_len=1024, rows=512, peak=6e-4, mesh="dp", steps=19_073)

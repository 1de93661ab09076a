"""DeepSeek-V3 pretraining (arXiv:2412.19437): the architecture as released, from random weights.

    jaxllm train deepseek_v3 --data.source tokens.bin --data.tokenizer path/to/tokenizer.json

Load balancing as in the paper's section 4.2: balance biases with step size 0.001 and a load-balancing loss of weight
0.0001. Multi-token prediction layers are left out. Tables as in recipes/llama3.py. Not run at this size; the training
step was compiled.
"""

from jaxllm.models import BlockConfig, MLAConfig, MlpConfig, MoeConfig, RopeConfig, RouterConfig
from jaxllm.train import RoutingConfig, RunConfig
from recipes._pretraining import decoder, pretraining


def deepseek_v3() -> RunConfig:
    """671B parameters, 37B active per token; 8-way expert parallelism with 32 experts per device group.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v5p:8x8x8   |  8.308 |  26.9 | 51.3 |     51.2 |  95.7 |
    | tpu7x:4x8x8 |  8.503 |  10.5 | 54.1 |        - |  94.7 |
    | h100:64x8   | 16.088 |   6.4 | 45.2 |        - |  79.1 |
    | h200:64x8   | 15.724 |   6.6 | 45.2 |        - | 141.0 |
    """
    latent = MLAConfig(
        heads=128,
        latent=512,
        q_latent=1536,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        rope=RopeConfig(theta=10_000.0, interleaved=True),
    )
    router = RouterConfig(
        scoring="sigmoid", scale=2.5, groups=8, top_groups=4, group_score="best two", balance_bias=True
    )
    dense = BlockConfig(latent, MlpConfig(hidden=18432))
    mixed = BlockConfig(latent, MoeConfig(experts=256, top_k=8, hidden=2048, shared=2048, router=router))
    model = decoder(129_280, 7168, 61, mixed, prefix=(dense,) * 3, norm_eps=1e-6)
    routing = RoutingConfig(balance_loss=1e-4, bias_rate=1e-3)
    return pretraining(
        "deepseek_v3", model, seq_len=4096, rows=512, peak=2.2e-4, mesh="fsdp=64,expert=8", routing=routing
    )

"""DeepSeek-V3 pretraining (arXiv:2412.19437): the architecture as released, from random weights.

    jaxllm train deepseek_v3 --data.source tokens.bin --data.tokenizer path/to/tokenizer.json

Experts are kept in use as in the paper's section 4.2: biases moved by 0.001, a balance loss of 0.0001. The layers that
predict further tokens (multi-token prediction) are left out. docs/parallelism.md has its memory on slices of TPUs.
"""

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import BlockConfig, DecoderConfig, LatentConfig, MlpConfig, MoeConfig, RopeConfig, RouterConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RoutingConfig, RunConfig


def deepseek_v3() -> RunConfig:
    """671B parameters, 37B of them for each token, for 512 devices of some 60 GB: 32 experts on each of eight parts."""
    latent = LatentConfig(
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
    return RunConfig(
        name="deepseek_v3",
        model=DecoderConfig(
            vocab_size=129_280,
            embed_dim=7168,
            layers=61,
            prefix=(dense,) * 3,
            pattern=(mixed,),
            tied=False,
            norm_eps=1e-6,
            dtype="bfloat16",
            remat="full",
        ),
        data=DataConfig(source="tokens.bin", tokenizer="tokenizer.json", seq_len=4096, batch_size=512),
        optim=OptimConfig(schedule=ScheduleConfig(kind="cosine", peak=2.2e-4, warmup=0.01, floor=0.1)),
        routing=RoutingConfig(balance_loss=1e-4, bias_rate=1e-3),
        steps=100_000,
        mesh="fsdp=64,expert=8",
        checkpoint=CheckpointConfig(every=1000),
        eval_every=2000,
    )

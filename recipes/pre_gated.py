"""Pre-gated mixture on Shakespeare (arXiv:2308.12066): each router reads the input of the mixture before its own.

    python -m recipes.pre_gated
    jaxllm serve runs/pre_gated --offload device=1GiB,experts=4

Which experts a layer wants is so known while the layer before computes, and with `--offload` they are in their slots
in time (docs/serve/offload.md). Minutes on two CPU cores.
"""

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MoeConfig, RouterConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig
from jaxllm.train.step.routing_losses import RoutingConfig


def pre_gated() -> RunConfig:
    """A mixture of 16 experts in each of four layers, whose routers read the layer before."""
    attention = AttentionConfig(heads=4, kv_heads=4, head_dim=32, qk_norm="head")
    moe = MoeConfig(experts=16, top_k=2, hidden=128, router=RouterConfig(input="previous"))
    return RunConfig(
        name="pre_gated",
        model=DecoderConfig(vocab_size=2048, embed_dim=128, layers=4, pattern=(BlockConfig(attention, moe),)),
        data=DataConfig(source="shakespeare", tokenizer="bpe:2048", seq_len=128, batch_size=16),
        optim=OptimConfig(schedule=ScheduleConfig(kind="wsd", peak=4e-3, warmup=0.03, decay=0.4, floor=0.02)),
        routing=RoutingConfig(balance_loss=0.02),
        steps=600,
        checkpoint=CheckpointConfig(every=200, keep_last=2),
        log_every=20,
        eval_every=200,
    )


if __name__ == "__main__":
    from jaxllm.cli.recipe_arguments import run_recipe

    raise SystemExit(run_recipe(pre_gated))

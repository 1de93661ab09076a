"""Llama 3 pretraining (arXiv:2407.21783): the architectures as released, from random weights.

    jaxllm train llama3_8b --data.source tokens.bin --data.tokenizer path/to/tokenizer.json

Mixed precision (bf16 compute, float32 parameters), full remat (gradient checkpointing), FSDP. Tables: step time (s),
MFU and memory per device (GiB) predicted by `jaxllm plan RECIPE --on SLICE --as-is --no-compile`; memory of the
compiled step ("compiled"); and the device's memory ("of"). Not run at these sizes; the training steps were compiled.
"""

from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, Llama3Scaling, MlpConfig, RopeConfig
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig
from recipes._pretraining import decoder, pretraining, with_token_share


def llama3_1b() -> RunConfig:
    """1.2B parameters (Llama 3.2's 1B), half a million tokens per step.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v5e:4x4     |  3.343 |  44.9 |  6.6 |      8.8 |  15.8 |
    | v6e:4x4     |  0.887 |  36.3 |  6.6 |      9.5 |  31.2 |
    | h100:1x8    |  1.365 |  43.8 | 13.3 |     31.4 |  79.1 |
    | h200:1x8    |  1.288 |  46.5 | 13.3 |        - | 141.0 |
    """
    model = _llama(2048, 16, 32, 8192, head_dim=64, factor=32.0, tied=True)
    return pretraining("llama3_1b", model, seq_len=8192, rows=64, peak=5e-4, mesh="fsdp")


def llama3_8b() -> RunConfig:
    """8B parameters, one row of 8,192 tokens per device.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v5e:8x8     |  4.616 |  46.4 |  6.5 |      7.9 |  15.8 |
    | v5p:4x4x4   |  1.820 |  50.5 |  6.5 |      6.5 |  95.7 |
    | v6e:8x8     |  1.244 |  36.9 |  6.5 |      6.6 |  31.2 |
    | tpu7x:2x4x4 |  0.940 |  38.9 |  8.5 |      9.0 |  94.7 |
    | h100:8x8    |  0.959 |  44.5 |  7.9 |      7.9 |  79.1 |
    | h200:8x8    |  0.923 |  46.2 |  7.9 |      9.7 | 141.0 |
    """
    return pretraining("llama3_8b", _8b(), seq_len=8192, rows=64, peak=3e-4, mesh="fsdp")


def llama3_8b_128k() -> RunConfig:
    """8B parameters, four rows of 131,072 tokens; context parallelism: ring attention over 16 devices.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v5p:4x4x4   |  7.128 |  37.1 |  6.5 |      8.3 |  95.7 |
    | v6e:8x8     |  3.917 |  33.7 |  6.5 |        - |  31.2 |
    | tpu7x:2x4x4 |  3.221 |  32.7 |  8.5 |        - |  94.7 |
    | h100:8x8    | 18.624 |   6.6 |  9.1 |     10.9 |  79.1 |
    | h200:8x8    | 13.232 |   9.3 |  9.1 |        - | 141.0 |
    """
    mesh = "fsdp=4,context=16"
    return pretraining("llama3_8b_128k", _8b(), seq_len=2**17, rows=4, peak=3e-5, mesh=mesh)


def llama3_8b_1m() -> RunConfig:
    """8B parameters, one row of 1,048,576 tokens; context parallelism: ring attention over all devices.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v5p:4x4x8   | 46.480 |  33.4 |  5.6 |      5.6 |  95.7 |
    | v6e:8x16    | 23.534 |  33.0 |  5.6 |        - |  31.2 |
    | tpu7x:4x4x4 | 20.443 |  30.2 |  7.6 |        - |  94.7 |
    | h100:16x8   |  142.9 |   5.0 |  8.2 |        - |  79.1 |
    """
    return pretraining("llama3_8b_1m", _8b(), seq_len=2**20, rows=1, peak=3e-5, mesh="context=128")


def llama3_8b_1m_node() -> RunConfig:
    """8B parameters, one row of 1,048,576 tokens on a node of eight GPUs, whose host holds activations.

    Matmul results of a share of the tokens are moved to the host, the others' are computed again. The share is
    computed: the most that the forward pass hides and 256 GiB of host memory for each GPU hold, 9/16, as `jaxllm plan
    llama3_8b_1m_node --on h200:1x8 --as-is --host 256GiB` prints. With a host of another size, or other GPUs, `jaxllm
    train llama3_8b_1m_node --fit --host SIZE` computes it from the compiled step. With full remat the step takes 90.6
    GiB and 1598 s by the same formulas.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | h200:1x8    | 1182.6 |   9.7 | 74.2 |        - | 141.0 |
    """
    run = pretraining("llama3_8b_1m_node", _8b(), seq_len=2**20, rows=1, peak=3e-5, mesh="context=8")
    return with_token_share(run, "h200:1x8", 256 * 2**30)


def llama3_70b() -> RunConfig:
    """70B parameters; 4-way tensor parallelism.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v5e:16x16   | 11.153 |  41.9 | 10.1 |        - |  15.8 |
    | v5p:4x8x8   |  4.267 |  47.0 | 10.1 |     10.3 |  95.7 |
    | v6e:16x16   |  3.414 |  29.4 | 10.1 |     10.3 |  31.2 |
    | tpu7x:4x4x8 |  2.863 |  27.9 | 11.6 |     11.3 |  94.7 |
    | h100:32x8   |  2.437 |  38.2 |  9.0 |      8.8 |  79.1 |
    | h200:32x8   |  2.388 |  38.9 |  9.0 |        - | 141.0 |
    """
    mesh, plan = "fsdp=64,tensor=4", ParallelConfig(sequence=True)
    model = _llama(8192, 80, 64, 28672)
    return pretraining("llama3_70b", model, seq_len=8192, rows=64, peak=1.5e-4, mesh=mesh, parallel=plan)


def llama3_405b() -> RunConfig:
    """405B parameters; 8-way tensor parallelism.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v5p:8x8x16  | 11.967 |  47.1 | 16.0 |     15.8 |  95.7 |
    | 4*v6e:16x16 | 10.192 |  27.6 | 16.0 |     17.6 |  31.2 |
    | tpu7x:8x8x8 |  8.713 |  25.7 | 17.0 |     18.1 |  94.7 |
    | h100:128x8  | 10.493 |  24.9 | 12.5 |     13.2 |  79.1 |
    | h200:128x8  | 10.396 |  25.1 | 12.5 |        - | 141.0 |
    """
    mesh, plan = "fsdp=128,tensor=8", ParallelConfig(sequence=True)
    model = _llama(16384, 126, 128, 53248)
    return pretraining("llama3_405b", model, seq_len=8192, rows=128, peak=8e-5, mesh=mesh, parallel=plan)


def _8b() -> DecoderConfig:
    return _llama(4096, 32, 32, 14336)


def _llama(
    width: int, layers: int, heads: int, hidden: int, *, head_dim: int = 128, factor: float = 8.0, tied: bool = False
) -> DecoderConfig:
    rope = RopeConfig(theta=500_000.0, scaling=Llama3Scaling(factor=factor))
    attention = AttentionConfig(heads=heads, kv_heads=8, head_dim=head_dim, rope=rope)
    return decoder(128_256, width, layers, BlockConfig(attention, MlpConfig(hidden=hidden)), tied=tied)

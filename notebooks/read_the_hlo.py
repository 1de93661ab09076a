# %% [markdown]
# # Read the HLO
# **At the end you have** the compiled training step of a Llama before you: products, loops, collectives, memory.

# %% [setup]

# %%
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import matplotlib.pyplot as plt

from jaxllm.compiler import live_ranges
from jaxllm.compiler import program_walker
from jaxllm.compiler.replica_groups import Placement
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional, param_count
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import step_on
from sharding.topology import Topology

# %% [markdown]
# The step of a small model, for eight devices, each with a part of every weight (FSDP):

# %%
block = BlockConfig(AttentionConfig(heads=4, kv_heads=2, head_dim=32), MlpConfig(hidden=512))
model = DecoderConfig(vocab_size=1024, embed_dim=128, layers=6, pattern=(block,), remat="full")
run = RunConfig("read", model, data=DataConfig(seq_len=256, batch_size=16), mesh="fsdp=8")
step, arguments, mesh = step_on(Topology.parse("cpu:8"), run)
with jax.set_mesh(mesh):
    compiled = step.lower(*arguments).compile()
text = compiled.as_text()
print(f"{len(text.splitlines()):,} lines of HLO; its main computation begins")
print("\n".join(line[:110] for line in text[text.index("\nENTRY ") :].splitlines()[2:7]))

# %% [markdown]
# XLA's own count sees the body of a loop once, and layers are a loop. The walker multiplies loops out:

# %%
program = program_walker.read(text, Placement.of(mesh))
tokens = run.data.batch_size * run.data.seq_len
parameters = param_count(functional(model).abstract())
analysis = compiled.cost_analysis()
print(f"XLA's count  {analysis['flops'] / 1e9:8.2f} GFLOP a device")
print(f"the walker   {program.flops / 1e9:8.2f} GFLOP a device")
print(f"8 N D        {8 * parameters * tokens / 8 / 1e9:8.2f} GFLOP a device (6 N D, and a pass again)")

# %% [markdown]
# What is sent, by the axis of the mesh along which it goes. (This is XLA's CPU program: for a TPU's or a GPU's, compile
# for it, below; that one fuses other things.)

# %%
for row in program.collectives:
    print(row)

# %%
kernels = {}
for op, times in program.ops:
    kernels[op.label] = kernels.get(op.label, 0) + op.flops * times
most = sorted(kernels.items(), key=lambda pair: pair[1])[-8:]
plt.figure(figsize=(7, 3))
plt.barh([name[-50:] for name, _ in most], [flops / 1e9 for _, flops in most])
plt.xlabel("GFLOP a device, by what asked for it")
# %% [markdown]
# Memory over the schedule, and what it is at its highest:

# %%
memory = live_ranges.read(text)
plt.figure(figsize=(7, 3))
plt.plot(memory.total / 2**20)
plt.xlabel("instruction of the schedule")
plt.ylabel("MiB of a device")
for kind, size in sorted(memory.at_peak().items(), key=lambda pair: -pair[1]):
    print(f"{size / 2**20:8.2f} MiB  {kind}")

# %% [markdown]
# The same for a pod that you do not have: `pip install 'jaxllm[tpu,aot-gpu]'` brings the compilers, then
#
#     jaxllm compile llama3_8b --on v6e:8x8 --html step.html
#
# writes one page with the timeline, the roofline and the memory. docs/internals/compiler.md says how each figure is
# counted.

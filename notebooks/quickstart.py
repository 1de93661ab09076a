# %% [markdown]
# # Quickstart
# **At the end you have** a small Llama that you trained on Shakespeare yourself, its loss curve, and a scene it wrote.

# %% [setup]

# %%
import dataclasses
import tempfile

import matplotlib.pyplot as plt

import jaxllm
from recipes.quickstart import quickstart

# %% [markdown]
# A recipe is a function that returns everything a run is: model, data, optimizer, how long. Any field can be replaced.
# This one has 1.6 million parameters; its 600 steps take two CPU cores about two minutes. Here a sixth of them:

# %%
run = dataclasses.replace(quickstart(), steps=100, out=tempfile.mkdtemp())
print(run.model)

# %%
finished = jaxllm.train.train(run)

# %% [markdown]
# The run's directory holds its configuration, metrics, checkpoints and a receipt, from which `jaxllm reproduce` runs it
# again. Plays that it has never seen cost it so many bits a byte (what counting pairs of bytes achieves is 3.68):

# %%
print(f"{finished.evaluation.bits_per_byte:.2f} bits per byte on held-out plays")

# %%
from jaxllm.train.records.run_directory import RunDirectory

rows = [row for row in RunDirectory(finished.directory).read_metrics() if "nll" in row]
plt.figure(figsize=(7, 3))
plt.plot([row["step"] for row in rows], [row["nll"] for row in rows])
plt.xlabel("step")
plt.ylabel("loss, nats per token")
plt.title("What you trained")
# %% [markdown]
# The engine that serves it runs the same forward pass that trained it, with continuous batching and a paged cache:

# %%
llm = jaxllm.infer.LLM(finished.directory)
params = jaxllm.infer.SamplingParams(max_tokens=60, temperature=0.8, seed=1)
for completion in llm.generate(["ROMEO:", "JULIET:"], params):
    print(completion.outputs[0].text, "\n" + "-" * 40)

# %% [markdown]
# Next: all 600 steps (`steps=600`), a text of your own (`data.source="notes.txt"`), or the other notebooks.

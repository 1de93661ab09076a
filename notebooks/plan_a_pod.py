# %% [markdown]
# # Plan a pod
# **At the end you have** the fastest predicted layout of an 8B model on pods you do not own, and what it costs.

# %% [setup]

# %%
import dataclasses

import matplotlib.pyplot as plt

from jaxllm.plan import layout_search
from jaxllm.plan import plan_view
from jaxllm.plan.training_cost import cost
from jaxllm.plan.hardware import Cluster
from recipes.llama3 import llama3_8b
from sharding import MeshSpec

# %% [markdown]
# Every figure below is predicted by formula (docs/train/plan.md has them, and how far they are from compilers and
# published runs); `jaxllm plan` without `--no-compile` then asks the pod's own compiler.

# %%
cluster = Cluster.parse("v6e:8x8")
found = layout_search.search(llama3_8b(), cluster)
layouts = found.layouts[:8]
print(f"{found.tried} layouts tried, {len(found.layouts)} meshes fit")
print(plan_view.ranking(layouts, cluster))

# %% [markdown]
# Where the time goes, from the fastest layout down:

# %%
figure, axis = plt.subplots(figsize=(9, 3.5))
labels = [f"{layout.mesh} {layout.run.model.remat}" for layout in layouts]
left = [0.0] * len(layouts)
for part in plan_view.parts(layouts[0]):
    seconds = [plan_view.parts(layout)[part] for layout in layouts]
    axis.barh(labels, seconds, left=left, label=part)
    left = [a + b for a, b in zip(left, seconds, strict=True)]
axis.invert_yaxis()
axis.set_xlabel("seconds of a step")
axis.legend()
# %%
print(plan_view.explained(layouts[0], cluster))

# %% [markdown]
# The same run on other machines, as it is (fully sharded, everything recomputed), for 15 trillion tokens:

# %%
mfu = {}
for name in ("v5e:8x8", "v5p:4x4x4", "v6e:8x8", "tpu7x:2x4x4", "h100:8x8", "h200:8x8"):
    there = Cluster.parse(name)
    layout = layout_search.predict_layout(llama3_8b(), MeshSpec.parse("fsdp=64"), there)
    mfu[name] = 100 * layout.time.mfu(there.hardware.flops)
    spent = cost(layout, there, 15e12)
    dollars = "price not known" if spent.dollars is None else f"${spent.dollars:,.0f}"
    print(f"{name:12} {layout.time.seconds:6.2f} s/step  {mfu[name]:4.1f}% MFU  {spent.days:6.0f} days  {dollars}")

# %%
plt.figure(figsize=(7, 2.6))
plt.bar(list(mfu), list(mfu.values()))
plt.ylabel("predicted MFU, %")
# %% [markdown]
# Longer rows on the same pod: attention grows with their square, memory with the tokens of a device.

# %%
for length in (8192, 32768, 131072):
    run = llama3_8b()
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, seq_len=length, batch_size=2**19 // length))
    best = layout_search.search(run, cluster).layouts
    said = f"{best[0].mesh}, {best[0].time.seconds:.2f} s" if best else "nothing fits"
    print(f"rows of {length:>7,}: {said}")

# %% [markdown]
# `jaxllm plan llama3_8b --on v6e:8x8 --save planned.py` writes the layout as a recipe for `jaxllm train`.

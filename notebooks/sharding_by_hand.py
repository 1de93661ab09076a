# %% [markdown]
# # Sharding by hand
# **At the end you have** split a matrix product over eight devices in three ways, and can say what each one sends.

# %% [setup]

# %% [markdown]
# No pod is needed: eight devices are pretended on this machine's CPU. All of JAX's rules hold for them.

# %%
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import sharding
from jaxllm.compiler import collectives
from sharding import MeshSpec

mesh = MeshSpec.parse("fsdp=4,tensor=2").build()
mesh

# %% [markdown]
# A model names its dimensions (`batch`, `embed`, `mlp`); one table says over which axes of the mesh each of them is
# split. A dimension that does not divide, or two that want the same axis, raise an error that says what is legal.

# %%
rules = sharding.DEFAULT
for names, shape in [(("batch", "seq", "act_embed"), (8, 16, 64)), (("embed", "mlp"), (64, 128))]:
    try:
        print(names, rules.spec(names, mesh, shape, what="array"))
    except sharding.ShardingError as error:
        print(names, error)

# %% [markdown]
# Who holds what of a matrix of 64 x 128, split over both axes:


# %%
def owners(spec):
    """The device that holds each element (of several, the first)."""
    held = np.full((64, 128), -1)
    array = jax.device_put(jnp.zeros((64, 128)), jax.NamedSharding(mesh, spec))
    for shard in array.addressable_shards:
        held[shard.index] = np.where(held[shard.index] < 0, shard.device.id, held[shard.index])
    return held


specs = [jax.P("fsdp", "tensor"), jax.P("fsdp", None), jax.P(None, "tensor"), jax.P(("fsdp", "tensor"), None)]
figure, axes = plt.subplots(1, 4, figsize=(13, 2.6))
for axis, spec in zip(axes, specs, strict=True):
    axis.imshow(owners(spec), cmap="tab10", vmin=0, vmax=9, aspect="auto")
    axis.set_title(str(spec).replace("PartitionSpec", "P"), fontsize=9)

# %% [markdown]
# Now `x @ w`, laid out by hand. Under explicit axes JAX works out where the result lives, and refuses what is
# ambiguous: a sum over a split dimension may end up anywhere, so it has to be told.

# %%
x, w = jnp.ones((32, 64)), jnp.ones((64, 128))


def put(array, *spec):
    return jax.device_put(array, jax.NamedSharding(mesh, jax.P(*spec)))


with jax.set_mesh(mesh):
    try:
        put(x, "fsdp", "tensor") @ put(w, "tensor", None)
    except Exception as error:
        print(type(error).__name__, "-", str(error).splitlines()[0])

# %% [markdown]
# Three ways, with what the compiled programs send. `AR` adds up parts of a sum, `AG` brings parts of a weight together:

# %%
ways = {
    "columns of w (Megatron's first)": ((None, None), (None, "tensor"), jax.P(None, "tensor")),
    "rows of w (Megatron's second)": ((None, "tensor"), ("tensor", None), jax.P(None, None)),
    "data and gathered weights (FSDP)": (("fsdp", None), ("fsdp", None), jax.P("fsdp", None)),
}
sent = {}
for name, (of_x, of_w, out) in ways.items():
    with jax.set_mesh(mesh):

        def product(x, w, out=out, gather=(of_w[0] == "fsdp")):
            w = jax.reshard(w, jax.P(None, None)) if gather else w
            return jnp.einsum("bd,df->bf", x, w, out_sharding=out)

        arguments = put(x, *of_x), put(w, *of_w)
        text = jax.jit(product).lower(*arguments).compile().as_text()
        np.testing.assert_allclose(jax.jit(product)(*arguments), x @ w)
    found = collectives.read(text).collectives
    sent[name] = sum(row.total_bytes for row in found)
    print(f"{name:36}", ", ".join(f"{row.kind} x{row.count}" for row in found) or "nothing is sent")

# %%
plt.figure(figsize=(7, 2))
plt.barh(list(sent), [size / 1024 for size in sent.values()])
plt.xlabel("KiB that a device has of what is sent")

# %% [markdown]
# `jaxllm shard llama3_70b --devices 256` prints the same for every parameter of a model, and
# docs/train/parallelism.md what each plan costs.

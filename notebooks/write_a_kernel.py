# %% [markdown]
# # Write a kernel
# **At the end you have** a Pallas kernel of RMS norm that you wrote and held to its definition, on shapes that hurt.

# %% [setup]

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.experimental import pallas as pl

# %% [markdown]
# **The definition first**: the plainest code there is, in float32. What is fast is compared with it.


# %%
def reference(x, gain, eps=1e-6):
    h = x.astype(jnp.float32)
    return (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps) * gain).astype(x.dtype)


# %% [markdown]
# **The kernel** sees one block at a time: some rows of x in fast memory, and the gain. XLA reads x twice where it does
# not fuse; a kernel reads it once. On a TPU Mosaic compiles it; elsewhere Pallas interprets it, slowly and exactly.


# %%
def kernel(x_ref, gain_ref, out_ref, *, eps):
    h = x_ref[...].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)
    out_ref[...] = (h * scale * gain_ref[...]).astype(out_ref.dtype)


def rms_norm(x, gain, eps=1e-6, rows=64):
    count, width = x.shape
    if width % 128:
        raise NotImplementedError(f"rms_norm: width {width} is no multiple of a TPU's 128 lanes")
    return pl.pallas_call(
        lambda *refs: kernel(*refs, eps=eps),
        grid=(pl.cdiv(count, rows),),  # the last block may reach beyond the end: what is there is never written back
        in_specs=[pl.BlockSpec((rows, width), lambda i: (i, 0)), pl.BlockSpec((1, width), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((rows, width), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=jax.default_backend() != "tpu",
    )(x, gain[None])


# %% [markdown]
# **Shapes that hurt**: one row, a count that blocks do not divide, numbers whose squares are large.

# %%
rng = np.random.default_rng(0)
errors = {}
for count, width, size in [(1, 128, 1), (64, 256, 1), (65, 256, 1), (200, 512, 1e4), (7, 1024, 1e-4)]:
    x = jnp.asarray(size * rng.normal(size=(count, width)), jnp.bfloat16)
    gain = jnp.asarray(rng.normal(size=width), jnp.float32)
    right = reference(x.astype(jnp.float32), gain)
    found = {"kernel": rms_norm(x, gain), "all in bf16": x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)}
    found["all in bf16"] *= gain.astype(jnp.bfloat16)
    norm = jnp.linalg.norm(right)
    errors[f"{count} x {width}, {size:g}"] = [float(jnp.linalg.norm(y - right) / norm) for y in found.values()]
    # Rounded to bfloat16 once, at the end: 2^-8 at most of each number, 0.0017 on average. Twice would be 0.0024.
    assert errors[f"{count} x {width}, {size:g}"][0] < 0.0022
errors

# %%
figure, axis = plt.subplots(figsize=(7, 3))
places = np.arange(len(errors))
for number, name in enumerate(found):
    axis.bar(places + 0.4 * number, [pair[number] for pair in errors.values()], 0.4, label=name)
axis.axhline(0.0022, color="k", linestyle=":", label="asserted")
axis.set_xticks(places + 0.2, list(errors), fontsize=8)
axis.set_ylabel("relative error")
axis.legend(fontsize=8)

# %% [markdown]
# **Its gradient** is a rule of yours: JAX cannot differentiate a kernel. Keep x and one number a row, not the products.


# %%
@jax.custom_vjp
def norm(x, gain):
    return rms_norm(x, gain)


def forward(x, gain):
    return rms_norm(x, gain), (x, gain)


def backward(kept, d):
    return jax.vjp(reference, *kept)[1](d)


norm.defvjp(forward, backward)
x, gain = jnp.asarray(rng.normal(size=(9, 128)), jnp.float32), jnp.ones(128)
mine = jax.grad(lambda x: (norm(x, gain) ** 3).sum())(x)
right = jax.grad(lambda x: (reference(x, gain) ** 3).sum())(x)
print("gradient's relative error", float(jnp.linalg.norm(mine - right) / jnp.linalg.norm(right)))

# %% [markdown]
# In the package a kernel is a folder (api, reference, xla, pallas_tpu, ...), with one body of tests for all
# implementations: docs/howto/kernel.md.

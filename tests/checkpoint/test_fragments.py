"""Fragments of a provider's state share files; they come back bit for bit, each in its memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import (
    CheckpointConfig,
    CheckpointCorruptError,
    Checkpointer,
    CheckpointError,
    CheckpointMismatchError,
    StateFragment,
    StateFragments,
)
from jaxllm.checkpoint.state_providers import (
    check_providers,
    collect_facts,
    restore_providers,
    with_provider_arrays,
    with_provider_targets,
)
from tests import quick


class Parts:
    """A provider with arrays in both memories, some of which share a file."""

    name = "parts"

    def __init__(self, seed: int, wide: int = 5):
        rng = np.random.default_rng(seed)
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        sharded = jax.NamedSharding(mesh, jax.P("data"))
        self.table = jax.device_put(rng.normal(size=(4, wide)).astype(np.float32), sharded)
        self.mean = jnp.asarray(rng.normal(size=()), jnp.bfloat16)
        self.counts = rng.integers(0, 2**40, (3, 1))
        self.codes = jnp.asarray(rng.integers(0, 200, 7), jnp.uint8)
        self.none = np.zeros((0, 4), np.float32)
        self.loads = 0

    def arrays(self) -> Any:
        return StateFragments(
            table=StateFragment(self.table, file="table", dtype="float64"),
            codes=StateFragment(self.codes),
            mean=StateFragment(self.mean, memory="host"),
            none=StateFragment(self.none),
            counts=StateFragment(self.counts),
        )

    def facts(self) -> Any:
        return {"loads": self.loads}

    def restore(self, arrays: Any, facts: Any) -> None:
        self.table, self.mean, self.counts, self.codes, self.none = (
            arrays[name] for name in ("table", "mean", "counts", "codes", "none")
        )
        self.loads = facts["loads"] + 1


STATE = {"w": jnp.arange(6.0)}


def save(where: Any, provider: Parts, saving: str = "blocking") -> None:
    with Checkpointer(where, CheckpointConfig(saving=saving)) as out:  # type: ignore[arg-type]
        out.save(3, with_provider_arrays(STATE, [provider]), collect_facts([provider]))
        if saving != "blocking":
            out.wait_copied()
            # What a step would do with donated arrays.
            provider.table.delete()
            provider.codes.delete()
            provider.counts[:] = 0


@pytest.mark.parametrize("saving", ["blocking", "eager", "lazy", "overlapped"])
def test_they_come_back_as_they_were_saved(saving, tmp_path):
    want = Parts(0)
    save(tmp_path, Parts(0), saving)
    files = sorted(p.relative_to(tmp_path).as_posix() for p in (tmp_path / "step_00000003").rglob("also*/0"))
    assert [file.split("/")[2] for file in files] == ["also.parts.state", "also.parts.table"]
    sizes = [(tmp_path / file).stat().st_size for file in files]
    assert sizes == [7 + 2 + 0 + 24, 4 * 5 * 8]
    got = Parts(1)
    place = got.table.sharding
    with Checkpointer(tmp_path, read_only=True) as found:
        check_providers(found.read_meta(), [got])
        back, meta = found.restore(with_provider_targets(STATE, [got]))
        state = restore_providers(STATE, back, meta, [got])
    np.testing.assert_array_equal(state["w"], STATE["w"])
    assert isinstance(got.counts, np.ndarray)
    assert isinstance(got.mean, np.ndarray)
    assert got.table.sharding == place
    assert got.loads == 1
    for name in ("table", "mean", "counts", "codes", "none"):
        one, other = getattr(got, name), np.asarray(getattr(want, name))
        assert one.dtype == other.dtype, name
        assert np.asarray(one).tobytes() == other.tobytes(), name


def test_damage_is_found_and_other_fragments_are_refused(tmp_path):
    save(tmp_path, Parts(0))
    with Checkpointer(tmp_path, read_only=True) as found:
        with pytest.raises(
            CheckpointMismatchError, match=r"saved with the fragments .*'table', \[4, 5\].*but has .*4, 6"
        ):
            check_providers(found.read_meta(), [Parts(0, wide=6)])
        file = next((tmp_path / "step_00000003" / "state" / "also.parts.table").glob("0"))
        file.write_bytes(b"?" + file.read_bytes()[1:])
    with (
        Checkpointer(tmp_path, read_only=True) as found,
        pytest.raises(CheckpointCorruptError, match="also/parts/table"),
    ):
        found.restore(with_provider_targets(STATE, [Parts(1)]))


def test_what_is_no_array_of_numbers_is_refused():
    for one in (StateFragment("text"), StateFragment(np.array(["a"])), StateFragment(np.zeros(2), dtype="float99")):
        with pytest.raises(CheckpointError, match=r"state fragment x is a .* other values belong into facts"):
            StateFragments(x=one).files()


def test_a_cast_to_a_narrower_dtype_is_what_is_stored(rng):
    x = rng.normal(size=9).astype(np.float32)
    fragments = StateFragments(x=StateFragment(quick.jit(jnp.asarray)(x), dtype="bfloat16"))
    (packed,) = fragments.files().values()
    data = np.concatenate(list(packed.pieces({"x": lambda: [x[:4], x[4:]]})))
    assert data.nbytes == 18
    np.testing.assert_array_equal(fragments.unpacked({"state": data})["x"], x.astype(jnp.bfloat16).astype(np.float32))

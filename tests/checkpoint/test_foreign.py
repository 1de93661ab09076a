"""Fragments of other frameworks' ranks, written by torch itself, become whole arrays, bit for bit."""

from __future__ import annotations

import os

import numpy as np
import pytest

from jaxllm import cli
from jaxllm.checkpoint import Checkpointer, CheckpointError
from jaxllm.checkpoint.foreign.fragment_rules import AttentionHeads, FragmentRule, consolidate, parse_rules
from jaxllm.checkpoint.foreign.megatron import megatron_fragments
from jaxllm.checkpoint.foreign.torch_archive import ArchiveTensor, Record, read_archive, read_pickled_data
from jaxllm.checkpoint.foreign.torch_dcp import read_dcp
from tests import tiny

RULES = """
# Megatron's GPT
*.linear_fc1.weight            sharded 0 groups 2
*.linear_fc2.weight            sharded 1
*.word_embeddings.weight       sharded 0, padded 0 to 13
*.router.bias                  partial mean
*norm*                         replicated
"""


def test_rules_are_read():
    assert parse_rules(RULES) == (
        FragmentRule("*.linear_fc1.weight", "sharded", 0, 2),
        FragmentRule("*.linear_fc2.weight", "sharded", 1),
        FragmentRule("*.word_embeddings.weight", "sharded", 0, padding=(0, 13)),
        FragmentRule("*.router.bias", "partial", reduce="mean"),
        FragmentRule("*norm*", "replicated"),
    )
    for line in ("*.weight", "*.weight shard 0", "*.weight sharded", "* partial max", "* sharded 0 padded 0 to 3"):
        with pytest.raises(CheckpointError, match=r"line 2: .* is no rule. A rule is: PATTERN then one of"):
            parse_rules(f"\n{line}")
    with pytest.raises(CheckpointError, match="groups 0; give 1 or more"):
        parse_rules("* sharded 0 groups 0")


def test_fragments_become_whole(rng):
    """Cut by hand in each of the ways; the first rule that matches decides."""
    gate, up = rng.normal(size=(2, 6, 5)).astype(np.float32)
    down, table = rng.normal(size=(5, 6)).astype(np.float16), rng.normal(size=(16, 3)).astype(np.float32)
    bias, gain = rng.normal(size=(3, 4)), rng.normal(size=4)
    fragments = {
        "l.linear_fc1.weight": [np.concatenate([gate[2 * r : 2 * r + 2], up[2 * r : 2 * r + 2]]) for r in range(3)],
        "l.linear_fc2.weight": [down[:, :2], down[:, 2:3], down[:, 3:]],
        "l.word_embeddings.weight": [table[:8], table[8:]],
        "l.router.bias": list(bias),
        "l.norm.gain": [gain, gain.copy()],
    }
    calls = {name: [lambda one=one: one for one in found] for name, found in fragments.items()}
    found = consolidate(calls, parse_rules(RULES))
    np.testing.assert_array_equal(found["l.linear_fc1.weight"], np.concatenate([gate, up]))
    np.testing.assert_array_equal(found["l.linear_fc2.weight"], down)
    np.testing.assert_array_equal(found["l.word_embeddings.weight"], table[:13])
    np.testing.assert_allclose(found["l.router.bias"], bias.mean(0), rtol=1e-15)
    np.testing.assert_array_equal(found["l.norm.gain"], gain)
    total = parse_rules("* partial sum")[0].whole("x", [np.float32([1, 2]), np.float32([3, 4])])
    np.testing.assert_array_equal(total, np.float32([4, 6]))


@pytest.mark.parametrize(
    ("rules", "fragments", "words"),
    [
        ("*.b replicated", [np.zeros(2)], "no fragment rule matches a; there are: "),
        ("a replicated", [np.zeros(2), np.ones(2)], "copy of rank 1 is not equal to that of rank 0"),
        ("a sharded 1", [np.zeros((2, 3)), np.zeros((3, 3))], 'are not "sharded 1"'),
        ("a sharded 0 groups 2", [np.zeros(3)], "groups must divide the dim"),
        ("a sharded 0, padded 0 to 9", [np.zeros(3), np.zeros(3)], "padded to more than 9, but its shape is"),
        ("a partial sum", [np.zeros(3), np.zeros(4)], "differ in shape or dtype"),
    ],
)
def test_what_does_not_fit_its_rule_is_named(rules, fragments, words):
    with pytest.raises(CheckpointError, match=words):
        consolidate({"a": [lambda one=one: one for one in fragments]}, parse_rules(rules))


def test_archives_are_data_and_nothing_of_them_runs(tmp_path):
    torch = pytest.importorskip("torch")
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    file = tmp_path / "x.pt"
    torch.save(
        {"a": whole[1:, ::2], "b": whole.to(torch.bfloat16).T, "n": (1, None, "x", 2.5), "e": torch.empty(0)}, file
    )
    found = read_archive(file.read_bytes())
    np.testing.assert_array_equal(found["a"].read(), whole[1:, ::2].numpy())
    assert found["b"].shape == (6, 4)
    np.testing.assert_array_equal(found["b"].read().astype(np.float32), whole.T.numpy())
    assert found["n"] == (1, None, "x", 2.5)
    assert found["e"].read().shape == (0,)

    class Bad:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    torch.save({"model": {"w": whole}, "args": Bad()}, file)
    found = read_archive(file)
    assert isinstance(found["model"]["w"], ArchiveTensor)
    assert isinstance(found["args"], Record)
    assert found["args"].name.endswith("mkdir")
    assert not (tmp_path / "harm").exists()
    for broken, words in ((b"PK", "not a zip archive"), (b"\x80\x02}q", "pickle")):
        with pytest.raises(CheckpointError, match=words):
            (read_archive if words != "pickle" else read_pickled_data)(broken)


def test_megatron_style_ranks_are_read(tmp_path, rng):
    """Two tensor ranks by two stages of two layers each, in Megatron's files; layers are numbered through the model."""
    torch = pytest.importorskip("torch")
    fc1, fc2 = (torch.tensor(rng.normal(size=(4, 8, 8)), dtype=torch.bfloat16) for _ in range(2))
    table, gain = torch.tensor(rng.normal(size=(16, 8))), torch.tensor(rng.normal(size=(4, 8)), dtype=torch.float32)
    for stage in range(2):
        for rank in range(2):
            half = slice(4 * rank, 4 * rank + 4)
            gate_and_up = slice(2 * rank, 2 * rank + 2), slice(4 + 2 * rank, 6 + 2 * rank)
            layers = {}
            for layer in range(2):
                own = 2 * stage + layer
                layers[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] = torch.cat([fc1[own, s] for s in gate_and_up])
                layers[f"decoder.layers.{layer}.mlp.linear_fc2.weight"] = fc2[own, :, half]
                layers[f"decoder.layers.{layer}.norm.weight"] = gain[own]
            if stage == 0:
                layers["embedding.word_embeddings.weight"] = table[8 * rank : 8 * rank + 8]
            folder = tmp_path / f"mp_rank_{rank:02}_{stage:03}"
            folder.mkdir()
            torch.save({"model": layers, "iteration": 7}, folder / "model_optim_rng.pt")
    found = consolidate(megatron_fragments(tmp_path), parse_rules(RULES))
    assert len(found) == 4 * 3 + 1
    for layer in range(4):
        for name, whole in (("mlp.linear_fc1", fc1), ("mlp.linear_fc2", fc2), ("norm", gain)):
            own = found[f"decoder.layers.{layer}.{name}.weight"]
            assert own.tobytes() == whole[layer].contiguous().view(torch.uint8).numpy().tobytes(), (layer, name)
    np.testing.assert_array_equal(found["embedding.word_embeddings.weight"], table[:13].numpy())
    with pytest.raises(CheckpointError, match="has no part 'optimizer'; it has: model, iteration"):
        megatron_fragments(tmp_path, "optimizer")
    (tmp_path / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model_optim_rng.pt nor model_rng.pt"):
        megatron_fragments(tmp_path)
    (tmp_path / "mp_rank_01_001").rmdir()
    with pytest.raises(CheckpointError, match="lacks ranks"):
        megatron_fragments(tmp_path)


def test_distributed_checkpoints_of_torch_are_read(tmp_path, rng):
    """Saved by torch.distributed.checkpoint itself."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    table = torch.tensor(rng.normal(size=(16, 3)), dtype=torch.float32)
    state = {"embed": table, "layers": {"w": table.to(torch.bfloat16).T.contiguous()}, "step": 3}
    with pytest.warns(UserWarning, match="distributed"):
        dcp.save(state, checkpoint_id=tmp_path)
    found = read_dcp(tmp_path)
    np.testing.assert_array_equal(found["embed"], table.numpy())
    assert found["layers.w"].tobytes() == state["layers"]["w"].view(torch.uint8).numpy().tobytes()
    assert set(found) == {"embed", "layers.w"}
    cut = read_dcp(tmp_path, parse_rules("embed sharded 0, padded 0 to 13\n* sharded 0"))
    np.testing.assert_array_equal(cut["embed"], table[:13].numpy())
    next(tmp_path.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"distcp, which has a chunk of .*, is missing"):
        read_dcp(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint of torch.distributed.checkpoint"):
        read_dcp(tmp_path / "elsewhere")


def test_names_elsewhere():
    fused, pairs, dropped = parse_rules(
        "l.*.fc1.* sharded 0 groups 2 -> m.*.{gate,up}_proj.*\nl.*.wq.weight placed -> q.* by rotary pairs\n"
        "*._extra_state replicated -> nothing"
    )
    assert fused.names_of("l.3.fc1.bias") == ("m.3.gate_proj.bias", "m.3.up_proj.bias")
    assert pairs.names_of("l.12.wq.weight") == ("q.12",)
    assert dropped.names_of("a._extra_state") == ()
    assert parse_rules("* replicated")[0].names_of("x.y") == ("x.y",)
    halves = fused.split("l.3.fc1.bias", np.arange(6), None)
    assert [list(part) for part in halves] == [[0, 1, 2], [3, 4, 5]]
    two_heads = pairs.split("l.0.wq.weight", np.arange(8), AttentionHeads(2, 4))
    assert list(two_heads[0]) == [0, 2, 1, 3, 4, 6, 5, 7]
    for line, words in (
        ("l.* replicated -> m.*.*", "has more \\* than the pattern"),
        ("l.* replicated -> m.* by heads", "is no rule"),
        ("l.* sharded 0, padded 0 to vocabulary", "the vocabulary's size is not known here"),
    ):
        with pytest.raises(CheckpointError, match=words):
            parse_rules(line)
    qkv = parse_rules("* sharded 0 -> {q,k,v} by query groups")[0]
    with pytest.raises(CheckpointError, match='cannot be split "by query groups": each of 2 key-value heads'):
        qkv.split("a", np.zeros((12, 3)), AttentionHeads(2, 4))
    with pytest.raises(CheckpointError, match="no 2 equal parts along dim 0"):
        fused.split("l.3.fc1.bias", np.arange(5), None)
    with pytest.raises(
        CheckpointError, match="has 2 fragments and this kind of checkpoint does not say where they lie"
    ):
        parse_rules("* placed")[0].whole("a", [np.zeros(1), np.zeros(1)])


def restored(folder):
    """Leaves of the parameters in a checkpoint that `jaxllm convert` has written."""
    with Checkpointer(folder / "checkpoints", read_only=True) as found:
        leaves = found.map_leaves(None, prefix="params")
        return {path: np.array(leaf) for path, leaf in leaves.items()}


def same(found, want):
    assert found.keys() == want.keys()
    for path, leaf in want.items():
        assert found[path].dtype == leaf.dtype
        assert found[path].tobytes() == np.ascontiguousarray(leaf).tobytes(), path


def test_a_run_of_megatron_becomes_a_model(tmp_path, capsys):
    """Two tensor ranks by two stages, a padded vocabulary, two query heads to a key-value head: bit for bit."""
    pytest.importorskip("torch")
    from tests.checkpoint import foreign_runs

    config = tiny.decoder(dtype="bfloat16", vocab_size=61, layers=4, qk_norm="head", tied=False)
    leaves, tensors = foreign_runs.published(config, tmp_path / "like")
    foreign_runs.write_megatron(tmp_path / "run", config, tensors, ranks=2, stages=2, padded=64)
    argv = ["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "jaxllm"]
    assert cli.main(argv) == 2
    assert "give like, the directory of a config.json of its model" in capsys.readouterr().err.replace("\n", " ")
    argv += ["--like", str(tmp_path / "like")]
    assert cli.main(argv) == 0
    same(restored(tmp_path / "out"), leaves)
    rules = tmp_path / "rules"
    rules.write_text("embedding.* replicated -> x\n* replicated")
    assert cli.main([*argv[:2], str(tmp_path / "other"), *argv[3:], "--fragments", str(rules)]) == 2
    assert "the tensors are not those of this architecture" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "other").exists()


def test_a_run_of_torchtitan_becomes_a_model(tmp_path):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from jaxllm.convert.convert import convert
    from tests.checkpoint import foreign_runs

    config = tiny.decoder(dtype="float32", tied=False)
    leaves, tensors = foreign_runs.published(config, tmp_path / "like")
    state = foreign_runs.torchtitan_state(config, tensors) | {"optimizer": {"m": torch.zeros(3)}, "train_state": "x"}
    for name, own in (("titan", state), ("hf", {"model": tensors})):
        with pytest.warns(UserWarning, match="distributed"):
            dcp.save(own, checkpoint_id=tmp_path / name)
        convert(tmp_path / name, tmp_path / f"{name}_out", "jaxllm", like=tmp_path / "like")
        same(restored(tmp_path / f"{name}_out"), leaves)

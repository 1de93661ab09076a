"""Configurations to JSON and back, their differences, their hash."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from dataclasses import dataclass, field
from typing import Literal

import pytest

from jaxllm import cli
from jaxllm._renamed import RENAMED_MODULES
from jaxllm.config import (
    ConfigError,
    closest,
    differences,
    digest,
    from_dict,
    leaf_paths,
    renamed_fields,
    runtime_only,
    to_dict,
)
from jaxllm.data import DataConfig
from jaxllm.models import (
    BlockConfig,
    DecoderConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MlpConfig,
    RopeConfig,
    YarnScaling,
)
from jaxllm.train import RunConfig


@dataclass(frozen=True)
class Inner:
    size: int = 2
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    many: tuple[Inner, ...] = (Inner(),)
    pair: tuple[int, str] = (1, "x")
    names: str | tuple[str, ...] = "one"
    maybe: Inner | None = None
    rate: float = 0.5
    on: bool = False
    folder: str = runtime_only("here")
    saving: Inner = field(default_factory=Inner, metadata={"runtime_only": True})
    later: Inner | None = runtime_only(None)


FULL = Outer(
    Inner(3, "b"), (Inner(4), Inner(5)), (7, "y"), ("one", "two"), Inner(6), 1.25, True, "there", Inner(8), Inner(9)
)


@pytest.mark.parametrize("config", [Outer(), FULL], ids=["default", "full"])
def test_json_and_back(config):
    data = json.loads(json.dumps(to_dict(config)))
    assert from_dict(Outer, data) == config


@pytest.mark.drawn(1)
def test_every_recipe_survives_json():
    for name in cli.recipes():
        config = cli.find_recipe(name)()
        assert from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config


def test_what_is_left_out_is_the_default_and_integers_are_fine_floats():
    assert from_dict(Outer, {"rate": 1}) == Outer(rate=1.0)
    assert isinstance(from_dict(Outer, {"rate": 1}).rate, float)
    assert from_dict(Outer, {"many": []}).many == ()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"iner": {}}, r"config: unknown key 'iner'. Did you mean 'inner'\? Outer has: inner, many"),
        ({"inner": {"sise": 1}}, r"config.inner: unknown key 'sise'. Did you mean 'size'\?"),
        ({"many": [{}, {"sise": 1}]}, "config.many.1: unknown key 'sise'"),
        ({"zzz": 1}, "unknown key 'zzz'. Outer has"),
        ({"inner": 3}, "config.inner: expected the fields of Inner, got 3"),
        ({"inner": {"size": "3"}}, "config.inner.size: expected int, got '3'"),
        ({"inner": {"size": True}}, "config.inner.size: expected int, got True"),
        ({"inner": {"size": 2.5}}, "config.inner.size: expected int, got 2.5"),
        ({"inner": {"kind": "c"}}, "config.inner.kind: 'c' is not one of 'a', 'b'"),
        ({"rate": "fast"}, "config.rate: expected float, got 'fast'"),
        ({"rate": True}, "config.rate: expected float, got True"),
        ({"on": 1}, "config.on: expected bool, got 1"),
        ({"many": 3}, "config.many: expected a list, got 3"),
        ({"pair": [1]}, "config.pair: expected 2 values, got 1"),
        ({"pair": ["x", 1]}, "config.pair.0: expected int, got 'x'"),
        ({"names": 3}, "config.names: expected"),
        ({"inner": None}, "config.inner: expected the fields of Inner, got None"),
        ([], r"config: expected the fields of Outer, got \[\]"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(data, words):
    with pytest.raises(ConfigError, match=words):
        from_dict(Outer, data)


def test_the_digest_is_of_the_mathematics():
    config = RunConfig()
    assert digest(config) == digest(RunConfig())
    same = dataclasses.replace(
        config,
        name="other",
        out="elsewhere",
        mesh="fsdp",
        log_every=99,
        eval_every=7,
        checkpoint=dataclasses.replace(config.checkpoint, every=3, keep_last=9),
    )
    assert digest(same) == digest(config)
    others = [
        dataclasses.replace(config, seed=1),
        dataclasses.replace(config, steps=999),
        dataclasses.replace(config, accumulate=2),
        dataclasses.replace(config, data=DataConfig(seq_len=128)),
        dataclasses.replace(config, optim=dataclasses.replace(config.optim, clip_norm=None)),
        dataclasses.replace(config, model=DecoderConfig(pattern=(BlockConfig(), BlockConfig(mlp=MlpConfig(8))))),
    ]
    assert len({digest(other) for other in [config, *others]}) == len(others) + 1


def test_differences_are_listed_field_by_field():
    assert differences(Outer(), Outer()) == []
    found = {str(d): d.runtime_only for d in differences(Outer(), FULL)}
    assert found == {
        "inner.size: 2 -> 3": False,
        "inner.kind: a -> b": False,
        "many.0.size: 2 -> 4": False,
        "pair: [1, 'x'] -> [7, 'y']": False,
        "names: one -> ['one', 'two']": False,
        "maybe: None -> absent": False,
        "rate: 0.5 -> 1.25": False,
        "on: False -> True": False,
        "folder: here -> there": True,
        "saving.size: 2 -> 8": True,
        "many.1.size: absent -> 5": False,
        "many.1.kind: absent -> a": False,
        "maybe.size: absent -> 6": False,
        "maybe.kind: absent -> a": False,
        "later: None -> absent": True,
        "later.size: absent -> 9": True,
        "later.kind: absent -> a": True,
    }
    # The other way round too: nothing that only one of them has is lost.
    assert len(differences(FULL, Outer())) == len(found)


def test_a_scaled_rope_is_another_model():
    block = BlockConfig()
    rope = dataclasses.replace(block.attention, rope=RopeConfig(scaling=Llama3Scaling()))
    scaled = RunConfig(model=DecoderConfig(pattern=(dataclasses.replace(block, attention=rope),)))
    plain = RunConfig(model=DecoderConfig(pattern=(block,)))
    assert any("rope.scaling.factor" in d.path for d in differences(plain, scaled))
    assert digest(plain) != digest(scaled)


SCALINGS = [
    LinearScaling(2.0),
    Llama3Scaling(),
    YarnScaling(4.0, 128),
    DynamicScaling(2.0, 64),
    LongRopeScaling((1.0, 2.0), (3.0, 4.0), 32),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: type(s).__name__)
def test_one_of_several_kinds_is_read_back_as_itself(scaling):
    assert from_dict(RopeConfig, to_dict(RopeConfig(scaling=scaling))) == RopeConfig(scaling=scaling)


def test_fields_of_none_of_several_kinds():
    with pytest.raises(ConfigError, match=r"rope.scaling: the fields factor, lengths match none of these.*Yarn"):
        from_dict(RopeConfig, {"scaling": {"factor": 2.0, "lengths": 3}}, "rope")


def test_paths_are_what_the_command_line_takes():
    paths = leaf_paths(RunConfig())
    assert len(paths) == len(set(paths))
    assert {"steps", "data.seq_len", "optim.schedule.peak", "model.pattern.0.attention.rope.theta"} <= set(paths)


def test_closest():
    assert closest("stepz", ["steps", "seed"]) == " Did you mean 'steps'?"
    assert closest("qqqq", ["steps", "seed"]) == ""


@renamed_fields(width="hidden")
@dataclass(frozen=True)
class _Renamed:
    hidden: int = 1
    depth: int = 2


def test_deprecated_field_names_are_taken_with_a_warning():
    with pytest.warns(FutureWarning, match="_Renamed.width is now hidden"):
        old = _Renamed(width=5)
    assert old == _Renamed(hidden=5)
    with pytest.warns(FutureWarning):
        assert old.width == 5
    with pytest.warns(FutureWarning):
        assert dataclasses.replace(old, width=7) == _Renamed(7)
    assert from_dict(_Renamed, {"width": 3, "depth": 2}) == _Renamed(3)
    assert to_dict(old) == {"hidden": 5, "depth": 2}
    with pytest.raises(ConfigError, match="breadth"):
        from_dict(_Renamed, {"breadth": 3})


def test_deprecated_module_names_are_importable_with_a_warning():
    """Each old name gives the very module that has replaced it."""
    assert len(RENAMED_MODULES) > 100
    with pytest.warns(FutureWarning, match="jaxllm.infer.pages is now jaxllm.infer.scheduling.page_allocator"):
        old = importlib.import_module("jaxllm.infer.pages")
    assert old is importlib.import_module("jaxllm.infer.scheduling.page_allocator")
    assert old.__spec__ is not None
    assert old.__spec__.name == "jaxllm.infer.scheduling.page_allocator"
    for new in RENAMED_MODULES.values():
        assert importlib.util.find_spec(new) is not None, new

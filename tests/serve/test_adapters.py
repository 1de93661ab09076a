"""Adapters over HTTP: they are model names, are loaded and unloaded by those who may, and from where it is allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jax
import openai
import pytest

from jaxllm.cli.commands.serve import find_adapters
from jaxllm.cli.errors import UsageError
from jaxllm.infer import LoadedModel
from jaxllm.infer.llm import read_adapter
from jaxllm.peft import AdapterError, write_peft
from jaxllm.serve import ServeConfig
from jaxllm.text.byte_tokenizer import ByteTokenizer
from tests.serve import adapter_servers, servers
from tests.serve.adapter_servers import ADMIN


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three adapters and one that is damaged."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        adapter_servers.write(root / name, seed, 4 + 4 * seed)
    (adapter_servers.write(root / "cut", 9) / "adapter_model.safetensors").write_bytes(b"\0" * 40)
    return root


@pytest.fixture(scope="module")
def client(folder) -> Iterator[httpx.Client]:
    engine = adapter_servers.engine()
    engine.adapters.add("one", folder / "one")
    config = ServeConfig(port=0, name="tiny", adapter_dirs=(str(folder),), admin_keys=(ADMIN,))
    with (
        servers.running(adapter_servers.backend, config) as (_, url),
        httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {ADMIN}"}) as client,
    ):
        yield client
    for name in engine.adapters.names:
        engine.unload_adapter(name)


def say(client: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": "abc", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def post(client: httpx.Client, what: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/{what}_lora_adapter", json=body)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def test_an_adapter_is_a_model_name(client, folder):
    """For OpenAI's own client; its outputs are those of the engine with this adapter."""
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="any") as own:
        cards = {card.id: card.model_extra for card in own.models.list()}
        assert {name: (extra or {}).get("parent") for name, extra in cards.items()} == {"tiny": None, "one": "tiny"}
        assert own.models.retrieve("one").id == "one"
        chat = own.chat.completions.create(
            model="one", messages=[{"role": "user", "content": "a"}], max_tokens=4, temperature=0
        )
        assert chat.model == "one"
        assert len({say(client, "tiny"), say(client, "one")}) == 2
        with pytest.raises(openai.NotFoundError, match="no model 'four'; this server serves 'tiny' and 1 adapters"):
            own.completions.create(model="four", prompt="a")
        with pytest.raises(openai.NotFoundError, match="'one' is an adapter; embeddings are of 'tiny' alone"):
            own.embeddings.create(model="one", input="a")


def test_adapters_are_loaded_rolled_back_and_unloaded(client, folder):
    base = say(client, "tiny")
    assert post(client, "load", lora_name="new", lora_path="two") == {"id": "new", "object": "adapter", "revision": 1}
    first = say(client, "new")
    assert post(client, "load", lora_name="new", lora_path=str(folder / "three"))["revision"] == 2
    second = say(client, "new")
    assert len({base, first, second}) == 3
    assert post(client, "rollback", lora_name="new")["revision"] == 1
    assert say(client, "new") == first
    assert post(client, "rollback", 400, lora_name="new")["code"] == "no_revision"
    assert post(client, "unload", lora_name="new")["revision"] is None
    assert post(client, "unload", 404, lora_name="new")["code"] == "model_not_found"
    assert client.post("/v1/completions", json={"model": "new", "prompt": "a"}).status_code == 404
    metrics = client.get("/metrics").text
    assert 'jaxllm:adapters_catalogued{model_name="tiny"} 1.0' in metrics
    assert 'jaxllm:adapter_loads_total{model_name="tiny"}' in metrics
    assert adapter_servers.engine().runner.program_cache.counts.late == 0  # type: ignore[union-attr]


def test_others_may_not_and_nothing_is_half_loaded(client, folder, tmp_path):
    (folder / "link").symlink_to(tmp_path)
    adapter_servers.write(tmp_path / "outside", 1)
    names = adapter_servers.engine().adapters.names
    for path in ("../outside", str(tmp_path / "outside"), "link/outside", "/", "a\0b"):
        assert post(client, "load", 403, lora_name="x", lora_path=path)["param"] == "lora_path"
    wrong = {"cut": "cut", "none": "has no adapter_config.json"}
    for path, why in wrong.items():
        assert why in post(client, "load", 400, lora_name="x", lora_path=path)["message"]
    assert "is the base's name" in post(client, "load", 400, lora_name="tiny", lora_path="one")["message"]
    for headers in ({"authorization": ""}, {"authorization": "Bearer sk-other"}):
        answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "one"}, headers=headers)
        assert answer.status_code == 401
    assert adapter_servers.engine().adapters.names == names
    # One that was catalogued and is damaged when it is needed.
    adapter_servers.engine().adapters.add("cut", folder / "cut")
    answer = client.post("/v1/completions", json={"model": "cut", "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_unreadable")
    adapter_servers.engine().unload_adapter("cut")


MESH = jax.make_mesh((1,), ("data",))


def test_an_adapter_of_another_base_is_named(tmp_path):
    """By the hash that is beside adapters that were trained here."""
    own = dataclasses.replace(adapter_servers.adapter(1), base="mine", base_hash="float32:1")
    write_peft(tmp_path / "own", own, adapter_servers.model(), adapter_servers.SOURCE)
    loaded = LoadedModel(adapter_servers.model(), {}, ByteTokenizer(), None, MESH, 0, {}, adapter_servers.SOURCE)
    assert read_adapter(loaded, tmp_path / "own", base_hash="float32:1").base == "mine"
    with pytest.raises(AdapterError, match=r"own: .*mine"):
        read_adapter(loaded, tmp_path / "own", base_hash="float32:2")
    with pytest.raises(AdapterError, match="of no family"):
        read_adapter(dataclasses.replace(loaded, source=None), tmp_path / "own")


def test_without_admin_keys_nobody_may():
    with (
        servers.running(
            servers.opener(servers.FixedRate()), ServeConfig(port=0, name="tiny", adapter_dirs=("/",), api_keys=("k",))
        ) as (_, url),
        httpx.Client(base_url=url, headers={"authorization": "Bearer k"}) as client,
    ):
        assert "--admin-key-file" in post(client, "load", 403, lora_name="x", lora_path="x")["message"]


def test_the_command_finds_adapters(folder, tmp_path):
    assert {*find_adapters(folder)} >= {"one", "two", "three", "cut"}
    assert find_adapters(folder / "one") == {"one": folder / "one"}
    assert find_adapters(tmp_path) == {}
    with pytest.raises(UsageError, match="there is no directory"):
        find_adapters(tmp_path / "x")

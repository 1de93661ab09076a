"""Configuration of gateways: what each policy becomes, and what is refused."""

from __future__ import annotations

import json

import pytest
import yaml

from jaxllm import cli
from jaxllm.serve.gateway_config import GatewayError, envoy_config, kubernetes_manifests
from jaxllm.serve.vllm_metrics import PREFIX
from jaxllm.simulate.routing import ROUTERS, PrefixAware
from tests.launch.test_deploy import ROOT

REPLICAS = ["http://10.0.0.1:8000", "http://server-2:9000/"]


def parts(policy: str, **fields):
    made = envoy_config(REPLICAS, policy, **fields)["static_resources"]
    (listener,), (cluster,) = made["listeners"], made["clusters"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return listener, manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"], cluster


def test_envoy_balances_over_all_replicas():
    listener, route, cluster = parts("shortest-queue", port=8081)
    assert listener["address"]["socket_address"]["port_value"] == 8081
    ends = [one["endpoint"]["address"]["socket_address"]
            for one in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]]  # fmt: skip
    assert [(one["address"], one["port_value"]) for one in ends] == [("10.0.0.1", 8000), ("server-2", 9000)]
    assert cluster["lb_policy"] == "LEAST_REQUEST"
    assert cluster["least_request_lb_config"] == {"choice_count": 2}
    assert cluster["health_checks"][0]["http_health_check"] == {"path": "/ready"}
    assert (route["cluster"], route["timeout"]) == (cluster["name"], "0s"), "a stream may last"
    assert route["retry_policy"]["retriable_status_codes"] == [503]
    assert "transport_socket" not in cluster
    assert "hash_policy" not in route


def test_envoy_hashes_a_header_for_prefixes():
    _, route, cluster = parts("prefix-aware", header="x-conversation")
    assert cluster["lb_policy"] == "MAGLEV"
    assert route["hash_policy"] == [{"header": {"header_name": "x-conversation"}}]
    most = cluster["common_lb_config"]["consistent_hashing_lb_config"]["hash_balance_factor"]
    assert most == 100 * (1 + PrefixAware().share), "as the simulated policy"
    assert parts("round-robin")[2]["lb_policy"] == "ROUND_ROBIN"
    secure = envoy_config(["https://a.example", "https://b.example:8443"])["static_resources"]["clusters"][0]
    assert secure["transport_socket"]["name"] == "envoy.transport_sockets.tls"
    assert "443" in json.dumps(secure)


@pytest.mark.parametrize(
    ("replicas", "policy", "says"),
    [
        (["http://a:1", "https://b:1"], "round-robin", "all http or all https"),
        (["http://a:1", "http://a:1"], "round-robin", "different URLs"),
        (["a:1"], "round-robin", "give http://HOST:PORT"),
        (["http://a:1/v1"], "round-robin", "without a path"),
        (["http://a:99999"], "round-robin", "give http://HOST:PORT"),
        (["http://a:1"], "mixing-penalty", "Envoy has no such policy. Legal: round-robin, shortest-queue"),
    ],
)
def test_what_envoy_cannot_have_is_refused(replicas, policy, says):
    with pytest.raises(GatewayError, match=says):
        envoy_config(replicas, policy)


@pytest.mark.parametrize("policy", ["shortest-queue", "prefix-aware"])
def test_kubernetes_has_a_pool_a_route_and_a_picker(policy):
    """The pool selects the pods of deploy/kubernetes/server.yaml, whose metrics have the names it reads."""
    pool, route, picker = kubernetes_manifests(policy=policy)["items"]
    server = next(one for one in yaml.safe_load_all((ROOT / "deploy/kubernetes/server.yaml").read_text())
                  if one["kind"] == "Deployment")["spec"]["template"]  # fmt: skip
    assert pool["spec"]["selector"]["matchLabels"] == server["metadata"]["labels"]
    container = server["spec"]["containers"][0]
    assert pool["spec"]["targetPorts"] == [{"number": container["ports"][0]["containerPort"]}]
    assert PREFIX.rstrip(":") in container["args"]
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
    assert pool["spec"]["endpointPickerRef"]["name"] == picker["metadata"]["name"]
    config = yaml.safe_load(picker["data"]["config.yaml"])
    plugins = {one["type"] for one in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    assert {one["pluginRef"] for one in profile["plugins"]} == plugins - {"single-profile-handler"}
    assert ("prefix-cache-scorer" in plugins) == (policy == "prefix-aware")
    with pytest.raises(GatewayError, match="no such policy"):
        kubernetes_manifests(policy="round-robin")
    with pytest.raises(GatewayError, match="give labels of pods"):
        kubernetes_manifests(selector="jaxllm")


def test_the_command_writes_what_the_simulator_compares(tmp_path, capsys):
    file = tmp_path / "envoy.json"
    assert cli.main(["route", "envoy", "--replicas", ",".join(REPLICAS), "--policy", "prefix-aware", "--out",
                     str(file)]) == 0  # fmt: skip
    assert json.loads(file.read_text()) == envoy_config(REPLICAS, "prefix-aware")
    capsys.readouterr()
    assert cli.main(["route", "kubernetes", "--policy", "prefix-aware", "--name", "chat"]) == 0
    assert json.loads(capsys.readouterr().out) == kubernetes_manifests("chat")
    for policy in ROUTERS:
        legal = policy != "mixing-penalty"
        assert cli.main(["route", "envoy", "--replicas", "http://a:1", "--policy", policy]) == (0 if legal else 2)
    assert "jaxllm simulate --router all" in capsys.readouterr().err
    assert cli.main(["route", "envoy"]) == 2
    assert "--replicas: give the URLs" in capsys.readouterr().err

"""Configuration of the gateways that stand in front of several servers: Envoy, and the Kubernetes inference gateway.

A policy of ``jaxllm.simulate.routing`` becomes what a gateway has for it, and is refused where it has nothing. JSON is
written, which both read as YAML.

Sources: Envoy's API v3 (envoyproxy.io: bootstrap, cluster, route and HTTP connection manager); InferencePool
``inference.networking.k8s.io/v1`` and EndpointPickerConfig ``inference.networking.x-k8s.io/v1alpha1``
(gateway-api-inference-extension.sigs.k8s.io).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from jaxllm.config import ConfigError, closest

ENVOY_POLICIES = {
    "round-robin": "ROUND_ROBIN",
    "shortest-queue": "LEAST_REQUEST",
    "prefix-aware": "MAGLEV",
}
"""Load balancing of Envoy by router policy."""
MOST_LOAD = 125
"""Requests of a replica under consistent hashing, in percent of the mean; beyond it the next replica is taken. That is
``PrefixAware.share``."""
PREFIX_HEADER = "x-prefix-id"
"""Request header that names a shared prefix, such as a conversation: Envoy does not look into prompts."""
SCORERS = {
    "shortest-queue": {"queue-scorer": 1},
    "prefix-aware": {"prefix-cache-scorer": 3, "queue-scorer": 2, "kv-cache-utilization-scorer": 2},
}
"""Scorers of the Kubernetes inference gateway with their weights, by router policy."""
UNREADY = {"retry_on": "connect-failure,refused-stream,retriable-status-codes", "retriable_status_codes": [503]}
"""A request goes to another replica if one refuses it, or answers 503: it starts or stops and has computed nothing."""


class GatewayError(ConfigError):
    """Configuration that a gateway cannot have; says what is legal."""


def _legal(policy: str, known: Sequence[str], gateway: str) -> None:
    if policy not in known:
        raise GatewayError(
            f"policy = {policy!r}: {gateway} has no such policy.{closest(policy, known)} Legal: {', '.join(known)}; "
            "jaxllm simulate --router all says which pays."
        )


def envoy_config(
    replicas: Sequence[str], policy: str = "shortest-queue", port: int = 8080, header: str = PREFIX_HEADER
) -> dict[str, Any]:
    """Static bootstrap of an Envoy that balances requests over servers.

    Replicas are asked for ``/ready``, streams have no time limit, and what a replica refuses goes to another.

    Args:
        replicas: URLs of the servers, all http or all https, without a path.
        policy: a key of ``ENVOY_POLICIES``.
        port: port that Envoy listens on.
        header: request header whose value is hashed, for ``prefix-aware``; requests without it go anywhere.

    Raises:
        GatewayError: the policy, a URL or the port is not legal.
    """
    _legal(policy, tuple(ENVOY_POLICIES), "Envoy")
    places = [_place(url) for url in replicas]
    schemes = {scheme for scheme, *_ in places}
    if len(schemes) != 1 or len(set(places)) != len(places):
        raise GatewayError(f"replicas = {','.join(replicas)}: give one or more different URLs, all http or all https.")
    if not 0 < port < 65536:
        raise GatewayError(f"port = {port}: give 1 to 65535.")
    balanced: dict[str, Any] = {"lb_policy": ENVOY_POLICIES[policy]}
    if policy == "shortest-queue":
        # Of so many replicas drawn with replacement; the default of two would be power-of-two-choices.
        balanced["least_request_lb_config"] = {"choice_count": max(2, len(places))}
    if policy == "prefix-aware":
        balanced["common_lb_config"] = {"consistent_hashing_lb_config": {"hash_balance_factor": MOST_LOAD}}
    route: dict[str, Any] = {"cluster": "jaxllm", "timeout": "0s", "retry_policy": {
        **UNREADY, "num_retries": 2, "host_selection_retry_max_attempts": 3,
        "retry_host_predicate": [_typed("envoy.retry_host_predicates.previous_hosts",
                                        "retry.host.previous_hosts.v3.PreviousHostsPredicate")],
    }}  # fmt: skip
    if policy == "prefix-aware":
        route["hash_policy"] = [{"header": {"header_name": header}}]
    cluster = {
        "name": "jaxllm", "type": "STRICT_DNS", "connect_timeout": "2s", **balanced,
        "health_checks": [{"timeout": "2s", "interval": "5s", "unhealthy_threshold": 2, "healthy_threshold": 1,
                           "http_health_check": {"path": "/ready"}}],
        "load_assignment": {"cluster_name": "jaxllm", "endpoints": [{"lb_endpoints": [
            {"endpoint": {"address": _address(host, number)}} for _, host, number in places
        ]}]},
    }  # fmt: skip
    if schemes == {"https"}:
        cluster["transport_socket"] = _typed(
            "envoy.transport_sockets.tls", "transport_sockets.tls.v3.UpstreamTlsContext", auto_host_sni=True
        )
    manager = _typed(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="jaxllm", stream_idle_timeout="3600s",
        route_config={"virtual_hosts": [{"name": "jaxllm", "domains": ["*"], "routes": [
            {"match": {"prefix": "/"}, "route": route}
        ]}]},
        http_filters=[_typed("envoy.filters.http.router", "filters.http.router.v3.Router")],
    )  # fmt: skip
    return {
        "admin": {"address": _address("127.0.0.1", 9901)},
        "static_resources": {
            "listeners": [{"name": "jaxllm", "address": _address("0.0.0.0", port),
                           "filter_chains": [{"filters": [manager]}]}],
            "clusters": [cluster],
        },
    }  # fmt: skip


def _typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"type.googleapis.com/envoy.extensions.{kind}", **fields}}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _place(url: str) -> tuple[str, str, int]:
    """(scheme, host, port) of a replica's URL."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        parts, port = urlsplit(""), 0
    if not port or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise GatewayError(f"replica {url!r}: give http://HOST:PORT or https://HOST:PORT, without a path.")
    return parts.scheme, parts.hostname, port


def kubernetes_manifests(
    name: str = "jaxllm",
    *,
    selector: str = "app=jaxllm",
    port: int = 8000,
    gateway: str = "inference-gateway",
    policy: str = "prefix-aware",
) -> dict[str, Any]:
    """List of manifests for the Kubernetes inference gateway: pool of pods, route to it, configuration of its picker.

    The endpoint picker, a program of the gateway's own, is installed apart as ``NAME-epp`` with the configuration in
    the config map of that name. It reads the pods' metrics by vLLM's names: ``jaxllm serve --metrics-names vllm``.

    Args:
        name: name of the pool and its route.
        selector: label of the servers' pods, KEY=VALUE; several separated by commas.
        port: port of the servers.
        gateway: name of the Gateway that the route is attached to.
        policy: a key of ``SCORERS``.

    Raises:
        GatewayError: the policy or the selector is not legal.
    """
    _legal(policy, tuple(SCORERS), "the Kubernetes inference gateway")
    pairs = [part.strip().partition("=") for part in selector.split(",")]
    labels = {key: value for key, _, value in pairs}
    if not all(key and value for key, value in labels.items()):
        raise GatewayError(f"selector = {selector!r}: give labels of pods, such as app=jaxllm.")
    picker = f"{name}-epp"
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}
    items = [
        _manifest("inference.networking.k8s.io/v1", "InferencePool", name, spec={
            "selector": {"matchLabels": labels}, "targetPorts": [{"number": port}],
            "endpointPickerRef": {"name": picker, "port": {"number": 9002}},
        }),
        _manifest("gateway.networking.k8s.io/v1", "HTTPRoute", name, spec={
            "parentRefs": [{"name": gateway}],
            "rules": [{"matches": [{"path": {"type": "PathPrefix", "value": "/"}}], "backendRefs": [backend],
                       # Streams have no time limit.
                       "timeouts": {"request": "0s"}}],
        }),
        _manifest("v1", "ConfigMap", picker, data={"config.yaml": json.dumps(picker_config(policy), indent=2) + "\n"}),
    ]  # fmt: skip
    return {"apiVersion": "v1", "kind": "List", "items": items}


def picker_config(policy: str) -> dict[str, Any]:
    """Configuration of the endpoint picker: the policy's scorers, and the pod with the highest score."""
    scorers = SCORERS[policy]
    plugins = [{"type": kind} for kind in ("single-profile-handler", *scorers, "max-score-picker")]
    weighed = [{"pluginRef": kind, "weight": weight} for kind, weight in scorers.items()]
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha1", "kind": "EndpointPickerConfig", "plugins": plugins,
        "schedulingProfiles": [{"name": "default", "plugins": [*weighed, {"pluginRef": "max-score-picker"}]}],
    }  # fmt: skip


def _manifest(version: str, kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **fields}

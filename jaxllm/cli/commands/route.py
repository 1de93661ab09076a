"""``jaxllm route``: writes the configuration of a gateway in front of several servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxllm.cli.command_parser import parse_command


def route(argv: list[str]) -> int:
    """Configure a gateway over several servers: `jaxllm route envoy --replicas URL,URL`."""

    def run(
        to: Annotated[Literal["envoy", "kubernetes"], tyro.conf.Positional],
        /,
        policy: Literal["round-robin", "shortest-queue", "prefix-aware", "mixing-penalty"] = "shortest-queue",
        replicas: str = "",
        selector: str = "app=jaxllm",
        port: int | None = None,
        prefix_header: str = "x-prefix-id",
        name: str = "jaxllm",
        gateway: str = "inference-gateway",
        out: Path | None = None,
    ) -> int:
        """Writes the configuration of Envoy, or of the Kubernetes inference gateway, as JSON.

        `jaxllm simulate MODEL --on ... --router all` says which policy pays. A policy that a gateway does not have is
        refused.

        Args:
            to: envoy: a file for `envoy --config-path`; kubernetes: manifests for `kubectl apply --filename`, to which
                the gateway's endpoint picker is installed as NAME-epp.
            policy: router policy. Envoy: round-robin, shortest-queue, prefix-aware (consistent hashing of a header).
                Kubernetes: shortest-queue, prefix-aware (by the prefixes of the prompts).
            replicas: Envoy: URLs of the servers, separated by commas.
            selector: Kubernetes: label of the servers' pods.
            port: Envoy: port to listen on, 8080 by default. Kubernetes: port of the servers, 8000 by default.
            prefix_header: Envoy, prefix-aware: request header whose value requests with a common prefix share.
            name: Kubernetes: name of the pool and its route.
            gateway: Kubernetes: name of the Gateway.
            out: file to write; by default the terminal.
        """
        import json

        from jaxllm.cli.errors import UsageError
        from jaxllm.files import write_json
        from jaxllm.serve import gateway_config

        if to == "envoy":
            if not replicas:
                raise UsageError("--replicas: give the URLs of the servers, http://HOST:8000,http://OTHER:8000.")
            made = gateway_config.envoy_config(replicas.split(","), policy, port or 8080, prefix_header)
        else:
            if replicas:
                raise UsageError("--replicas: Kubernetes finds the servers by their label; give --selector app=jaxllm.")
            made = gateway_config.kubernetes_manifests(
                name, selector=selector, port=port or 8000, gateway=gateway, policy=policy
            )
        if out is None:
            print(json.dumps(made, indent=2))
        else:
            write_json(out, made)
            print(f"saved: {out}")
        return 0

    return parse_command(run, argv, "jaxllm route")

"""Files that deploy the server: images, compose, Kubernetes, Grafana name options, ports and routes that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxllm.cli.command_table import COMMANDS
from jaxllm.serve import ServeConfig, create_app
from tests import environment
from tests.test_cli import run

ROOT = environment.ROOT
DEPLOY = ROOT / "deploy"
YAML = sorted(DEPLOY.rglob("*.yaml"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def documents(file: Path) -> list[Any]:
    return [one for one in yaml.safe_load_all(file.read_text()) if one is not None]


def containers(file: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(container, pod) of every workload of a manifest."""
    pods = [one["spec"]["template"]["spec"] for one in documents(file) if "template" in one.get("spec", {})]
    return [(container, pod) for pod in pods for container in pod["containers"]]


@pytest.fixture(scope="module")
def routes() -> set[str]:
    return {route.path for route in create_app(ServeConfig()).routes}  # type: ignore[attr-defined]


def check_command(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Checks that a command and its options exist; returns its port."""
    assert words[0] in COMMANDS
    monkeypatch.setenv("COLUMNS", "300")
    assert run(words[0], "--help") == 0
    known = set(re.findall(r"(?<![\w-])--[\w.-]+", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} <= known
    assert words[words.index("--host") + 1] == "0.0.0.0"
    return words[words.index("--port") + 1]


@pytest.mark.parametrize("file", YAML, ids=lambda file: str(file.relative_to(DEPLOY)))
def test_yaml_can_be_read(file):
    assert documents(file)
    for one in documents(file) if file in MANIFESTS else []:
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(one)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_pass_options_that_exist_and_probe_routes_that_exist(file, routes, capsys, monkeypatch):
    found = containers(file)
    assert found
    for container, pod in found:
        port = check_command(container["args"], capsys, monkeypatch)
        ports = {one["name"]: str(one["containerPort"]) for one in container["ports"]}
        assert ports["http"] == port
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(name, {})
            if "httpGet" in probe:
                assert probe["httpGet"]["path"] in routes
                assert ports[probe["httpGet"]["port"]] == port
            for url in re.findall(r"http://127.0.0.1:(\d+)(/\w+)", str(probe.get("exec", ""))):
                assert url[0] == port
                assert url[1] in routes
        grace = container["args"][container["args"].index("--grace-seconds") + 1]
        assert pod["terminationGracePeriodSeconds"] > int(grace)
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    names = {port["name"] for container, _ in found for port in container["ports"]}
    for one in documents(file):
        if one["kind"] == "Service":
            assert {port.get("targetPort", port["name"]) for port in one["spec"]["ports"]} <= names


def test_the_processes_of_the_multihost_manifest_form_one_group():
    from jaxllm.parallel.cluster_environment import detect
    from sharding import MeshSpec

    service, _, pods = documents(DEPLOY / "kubernetes" / "multihost.yaml")
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    fixed = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    name = pods["metadata"]["name"]
    for rank in range(pods["spec"]["replicas"]):
        found = detect(fixed | {"JAXLLM_PROCESS_ID": str(rank)})
        assert (found.rank, found.processes) == (rank, pods["spec"]["replicas"])
        assert found.coordinator == f"{name}-0.{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    (label,) = [one for one in container["env"] if one["name"] == "JAXLLM_PROCESS_ID"]
    assert "apps.kubernetes.io/pod-index" in label["valueFrom"]["fieldRef"]["fieldPath"]
    mesh = container["args"][container["args"].index("--mesh") + 1]
    sizes = [size for _, size in MeshSpec.parse(mesh).axes]
    assert sizes[0] * sizes[1] == pods["spec"]["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"]


def test_compose_starts_a_server_that_is_scraped_and_drawn(routes, capsys, monkeypatch):
    (compose,) = documents(DEPLOY / "compose.yaml")
    server = compose["services"]["jaxllm"]
    port = check_command(server["command"], capsys, monkeypatch)
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"]
    path = re.search(rf"http://127.0.0.1:{port}(/\w+)", server["healthcheck"]["test"][-1])
    assert path is not None
    assert path[1] in routes
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], volume
    (prometheus,) = documents(DEPLOY / "compose" / "prometheus.yaml")
    (job,) = prometheus["scrape_configs"]
    assert job["metrics_path"] in routes
    assert job["static_configs"] == [{"targets": [f"jaxllm:{port}"]}]
    built = server["build"]
    assert (DEPLOY / built["context"] / built["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert f"AS {built['target']}" in (DEPLOY / "Dockerfile").read_text()


def test_the_images_copy_what_a_wheel_needs_and_install_extras_that_exist(capsys, monkeypatch):
    import tomllib

    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    said = (DEPLOY / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", said, re.MULTILINE) for word in line.split()]
    assert all((ROOT / name).exists() for name in copied)
    packages = {one.removesuffix("*") for one in about["tool"]["setuptools"]["packages"]["find"]["include"]}
    needed = {*packages, "pyproject.toml", about["project"]["readme"], *about["project"]["license-files"]}
    assert needed == set(copied)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == needed
    targets = dict(re.findall(r"^FROM base AS (\w+)\n(?:ENV .*\n)?RUN pip install \"\.\[(.*)\]\"", said, re.MULTILINE))
    assert set(targets) == {"cpu", "cuda", "tpu"}
    for extras in targets.values():
        assert set(extras.split(",")) <= set(about["project"]["optional-dependencies"])
    shown = re.findall(r"#\s+(serve .*--port \d+)", said)
    assert check_command(shown[0].split(), capsys, monkeypatch) in re.findall(r"EXPOSE (\d+)", said)

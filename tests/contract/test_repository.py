"""Files that people expect of a repository: they can be read, and they agree with the package."""

from __future__ import annotations

import os
import re

import pytest
import yaml

import jaxllm
from tests import environment

ROOT = environment.ROOT
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_citation_names_this_version_and_licence():
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "title", "message", "authors"} <= set(said)  # what the format requires
    assert (said["version"], said["license"]) == (jaxllm.__version__, "Apache-2.0")


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == jaxllm.__version__


def test_the_workflow_runs_the_script_of_ci():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    assert scripts == [".ci/run"]
    assert os.access(ROOT / scripts[0], os.X_OK)


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_issue_templates_are_forms(file):
    said = yaml.safe_load(file.read_text())
    if file.stem == "config":
        return
    assert {"name", "description", "body"} <= set(said)
    ids = [field["id"] for field in said["body"]]
    assert len(set(ids)) == len(ids) > 0
    assert all(field["attributes"]["label"] for field in said["body"])


def test_installing_is_told_truthfully():
    """While the changelog says that nothing is released, the pages say how to install without an index."""
    if "(not released yet)" not in (ROOT / "CHANGELOG.md").read_text():
        return
    for page in ("docs/install.md", "README.md"):
        assert "not on PyPI yet" in (ROOT / page).read_text(), page

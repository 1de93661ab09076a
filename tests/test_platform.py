"""Settings of XLA that the package makes when it is imported."""

from __future__ import annotations

import os

from jaxllm import _platform


def test_gpus_may_pin_all_of_the_hosts_memory(monkeypatch):
    """64 GiB on smaller hosts, XLA's own limit; what the user has set stays."""
    name = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 0}
    monkeypatch.setattr(_platform.os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(_platform.sys, "platform", "linux")
    for pages, limit in ((500 * 2**18, "500"), (8 * 2**18, "64")):
        sizes["SC_PHYS_PAGES"] = pages
        monkeypatch.delenv(name, raising=False)
        _platform.lift_host_memory_limit()
        assert os.environ[name] == limit
    monkeypatch.setenv(name, "7")
    _platform.lift_host_memory_limit()
    assert os.environ[name] == "7"

"""KV cache options of the commands: the format of pages, and which tokens stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig

KvFormat = str
"""Value of ``--kv-format``: auto, bf16 or bfloat16, which are the same, int8, fp8, int4, bfp4, kivi4, kivi2, or
shadowkv, which may have its sizes behind a colon."""
KEEP_ALL = "all"
"""Value of ``--kv-keep`` with which no token leaves the KV cache."""
CLUSTERED = "chai"
"""Value of ``--kv-keep`` with which all tokens stay, but keys of some heads only; its argument is the cluster size."""


def with_kv_cache(
    config: EngineConfig,
    kv_format: str = "auto",
    kv_keep: str = KEEP_ALL,
    kv_host: float = 0.0,
    kv_disk: Path | None = None,
) -> EngineConfig:
    """Configuration of an engine with a KV cache in a format, and with a retention rule.

    With a retention rule there is no prefix cache: a page's entries change after it is full. A format may have a page
    size of its own.

    Args:
        config: configuration of an engine.
        kv_format: see ``EngineConfig.kv_dtype``; "bf16" is bfloat16.
        kv_keep: "all", or a retention rule, see ``EngineConfig.retention``, or "chai" or "chai:SIZE" for
            ``EngineConfig.head_clusters``, 2 by default.
        kv_host: GiB of host memory for evicted pages, see ``EngineConfig.kv_host_gib``.
        kv_disk: directory for pages behind that; None: none.

    Raises:
        ConfigError: there is no such format or rule, or they do not go with the configuration.
    """
    from jaxllm.infer.runner.paged_cache import retention_rule
    from pallas_kernels.paged_attention import kv_formats

    dtype = "bfloat16" if kv_format == "bf16" else kv_format
    name, colon, heads = kv_keep.partition(":")
    try:
        pages = kv_formats.kv_format(dtype).page_size if kv_formats.is_quantised(dtype) else None
        if kv_keep != KEEP_ALL and name != CLUSTERED:
            retention_rule(kv_keep)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if pages is not None:
        config = replace(config, page_size=pages)
    tiers = {"kv_host_gib": kv_host, "kv_disk": None if kv_disk is None else str(kv_disk)}
    if kv_keep == KEEP_ALL:
        return replace(config, kv_dtype=dtype, **tiers)
    if name == CLUSTERED:
        if colon and not (heads.isdecimal() and int(heads) > 1):
            raise ConfigError(f"kv_keep = {kv_keep!r}; give chai:SIZE, 2 or more kv heads that share keys.")
        return replace(config, kv_dtype=dtype, head_clusters=int(heads) if colon else 2, **tiers)
    return replace(config, kv_dtype=dtype, retention=kv_keep, prefix_cache=False, **tiers)

"""Metrics under vLLM's names, for dashboards, autoscalers and gateways that read those of vLLM.

The table has what this server measures in vLLM's sense (https://docs.vllm.ai/en/stable/usage/metrics/, version 0.32);
other metrics of vLLM are absent rather than zero. The Kubernetes inference gateway needs ``num_requests_waiting``,
``num_requests_running`` and ``kv_cache_usage_perc`` of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

PREFIX = "vllm:"
ENGINE = {"engine": "0"}
"""Label that vLLM gives every metric: the number of the engine; here is one."""
VLLM_NAMES = {
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
    "kv_cache_usage_perc": "kv_cache_usage_perc",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "request_success": "request_success",
    "generation_tokens": "generation_tokens",
    "preemptions": "num_preemptions",
    "prefix_cache_hit_tokens": "prefix_cache_hits",
    "spec_decode_num_drafts": "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "spec_decode_num_accepted_tokens_per_pos",
}
"""Metrics of this server and their names in vLLM, both without prefix."""
SUMMED = {
    "prompt_tokens": "Prompt tokens, computed or found in the prefix cache.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
}
"""Counters of vLLM that are the sum of two here: prompt tokens that were computed, and those that were found."""


def vllm_families(families: Iterable[Metric], prefix: str) -> Iterator[Metric]:
    """Families of metrics under vLLM's names.

    Args:
        families: metrics of this server.
        prefix: prefix of their names.
    """
    labels: dict[str, str] | None = None
    total = 0.0
    for family in families:
        own = family.name.removeprefix(prefix)
        if own in ("prompt_tokens", "prefix_cache_hit_tokens"):
            labels = dict(family.samples[0].labels)
            total += sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
        if own in VLLM_NAMES:
            name = PREFIX + VLLM_NAMES[own]
            out = Metric(name, family.documentation, family.type)
            for sample in family.samples:
                renamed = name + sample.name.removeprefix(family.name)
                out.samples.append(Sample(renamed, {**sample.labels, **ENGINE}, *sample[2:]))
            yield out
    if labels is not None:
        for name, help_ in SUMMED.items():
            out = CounterMetricFamily(PREFIX + name, help_, labels=[*labels, *ENGINE])
            out.add_metric([*labels.values(), *ENGINE.values()], total)
            yield out

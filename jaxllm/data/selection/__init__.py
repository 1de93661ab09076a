"""Data selection: shares of a data mixture chosen by evidence. See `jaxllm.plan.mixture_plan` for the whole search."""

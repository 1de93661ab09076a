"""Co-serving: fine-tuning of an adapter in the time that an engine leaves (FlexLLM, arXiv:2402.18789)."""

"""Scores of texts by models that have them: `/score`, `/rerank`, `/pooling` and `/classify`."""

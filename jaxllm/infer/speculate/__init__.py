"""Speculative decoding: proposers of draft tokens, one a file, each a row of ``proposer_table``."""

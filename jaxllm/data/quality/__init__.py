"""Data quality: deduplication, decontamination, corpus statistics, rephrasing, and a bigram baseline."""

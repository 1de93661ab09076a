"""Several runs with adapters of one base, trained in one step."""

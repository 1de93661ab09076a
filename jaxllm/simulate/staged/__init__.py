"""Engines with pipeline stages in the serving simulator."""

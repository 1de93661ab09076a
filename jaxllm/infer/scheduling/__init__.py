"""Scheduling: which tokens of which sequences the next step computes, and the pages that they are given. No device."""

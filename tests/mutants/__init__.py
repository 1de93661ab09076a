"""Mutants: small deliberate faults in the code, one file a room, each with the tests that must notice it."""

"""Training with little communication: replicas that train by themselves, outer steps and compressed messages."""

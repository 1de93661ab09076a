"""Fleet of replicas in the serving simulator: replicas that fail and are repaired, and an autoscaler."""

"""Plans over memory tiers: what a limit costs, live bytes by tier over a step, token-wise offload."""

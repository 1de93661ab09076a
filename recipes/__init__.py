"""Recipes: functions that return the RunConfig of a training run."""

"""Plans: which layout a run should have on which devices, by formula first and by the compiler then."""

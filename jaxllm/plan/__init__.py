"""Planning: predicts which parallel layout of a run is fastest and fits, by a cost model, then by the compiler."""

"""Pipeline stages in serving: each stage has some of the layers, and several steps are in flight."""

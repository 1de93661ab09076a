"""Memory of compiled training steps beside its formula."""

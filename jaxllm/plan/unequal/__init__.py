"""Plans for clusters of unequal devices and links."""

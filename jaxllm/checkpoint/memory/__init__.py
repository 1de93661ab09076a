"""In-memory checkpoints: snapshots on peer servers, which survive a trainer's crash and the loss of a host."""

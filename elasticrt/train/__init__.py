"""The training loop: steps, recovery in place, and what ties samplers, checkpoints and groups together."""

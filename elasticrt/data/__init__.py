"""Data: the samples that a rank trains (order, samplers, position), and data that one process prepares for all."""

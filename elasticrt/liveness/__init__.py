"""Liveness of other agents, by probes, and of this node's workers, by their steps."""

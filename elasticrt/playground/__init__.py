"""A cluster on one machine: real agents and workers as processes, faults on request."""

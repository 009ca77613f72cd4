"""Runs in the training script: the Loop with its steps and evaluations, recovery in place, and saving."""

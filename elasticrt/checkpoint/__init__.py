"""The training state: copied, written, committed, found again, and sent to ranks that lack it."""

"""The training state: how it is copied, written, committed, restored, and sent to ranks that lack it."""

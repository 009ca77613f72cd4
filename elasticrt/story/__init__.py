"""What happened in a run, from the events of its agents: one fold, and what is said and drawn of it."""

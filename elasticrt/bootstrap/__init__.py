"""From the agent to the running script: the warm parent, and becoming `python -u script`."""

"""Whether others live and get on: probes between agents, and the steps of the node's own workers."""

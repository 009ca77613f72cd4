"""The agent: one process per node, from `elasticrt run` to its exit code. Never imports torch."""

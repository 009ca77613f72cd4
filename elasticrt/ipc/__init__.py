"""All that the agent and the training process share: environment, messages, status page. Standard library only."""

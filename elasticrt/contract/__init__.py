"""All that the agent and the training process share: environment, messages, the status page. Standard library only."""

"""The protocol in virtual time: production decisions over the memory store."""

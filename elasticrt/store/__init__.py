"""The store the agents meet in: protocol, in-memory model, etcd, sessions and the embedded server."""

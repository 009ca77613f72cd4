"""The in-memory model of etcd: what the simulator and the tests use in its place."""

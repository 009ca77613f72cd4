"""One suite for the model and for real etcd servers."""

"""A function of the caller's, run by the workers of an elastic run of its own."""

"""The tests, in layers; see "Tests" in README.md."""

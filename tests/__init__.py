"""The tests, in layers; see "Layers of tests" in CONTRIBUTING.md."""

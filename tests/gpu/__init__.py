"""What runs on a GPU, measured and checked: `python -m tests.gpu`."""

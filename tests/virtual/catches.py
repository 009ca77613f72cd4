"""Which invariant catches which mutant in which seed; written by `python -m tests.virtual.mutants --write`."""

CATCHES: dict[str, tuple[str, int]] = {}
HARMLESS: dict[str, str] = {}

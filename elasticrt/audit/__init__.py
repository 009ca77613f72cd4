"""Whether each sample counted exactly once, from the ledger files that the ranks have written."""

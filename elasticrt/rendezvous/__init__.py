"""How agents agree: records in the store, the view folded from them, the decisions, the transactions."""

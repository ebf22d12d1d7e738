"""One file an order: found by its name, imported when a plan chooses it."""

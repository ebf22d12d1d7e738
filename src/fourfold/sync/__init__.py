"""Sync: how replicas come to agree. One file a rule: found by its name, imported when a plan chooses it."""

"""Random programs for `scripts/fuzz`."""

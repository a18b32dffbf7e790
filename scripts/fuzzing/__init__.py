"""Random programs, run in plain MXNet and with mixed precision: see `scripts/fuzz`."""

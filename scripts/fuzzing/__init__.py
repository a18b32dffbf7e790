"""Random programs, run in plain MXNet and with mixed precision, and compared: see `scripts/fuzz`."""

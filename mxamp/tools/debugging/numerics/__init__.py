"""Finding where values go wrong, forward and backward."""

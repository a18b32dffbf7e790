"""A training run, step by step, in a file."""

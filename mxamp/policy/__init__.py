"""Which precision each operator computes in, as values. Imports `framework`."""

"""Passes over a symbol's graph: each returns a rewritten graph. Imports `policy` and below."""

"""Rewrites of a symbol's graph: each takes a graph and returns one. Imports `policy` and below."""

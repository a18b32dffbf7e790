"""Passes over a symbol's graph: each returns a rewritten graph.

They import `policy` and the layers below it.
"""

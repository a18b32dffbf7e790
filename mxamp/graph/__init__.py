"""Graph in, graph out: every change to a symbol's graph. Imports `policy` and below."""

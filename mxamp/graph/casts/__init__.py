"""Casts in a symbol's graph: inserted for a policy, and made offline in converted models."""

"""Policies: immutable values that say which precision each operator computes in."""

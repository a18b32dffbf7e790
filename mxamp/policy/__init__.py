"""Policies: immutable values that say in which precision each operator computes."""

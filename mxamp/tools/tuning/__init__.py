"""Policies found by measuring: within a tolerance of float32, and the fastest on this machine."""

"""Casts in graphs: inserted for a policy, and made offline in converted models."""

"""Faster graphs on CPUs: substitutions, choices by shape, and fusion."""

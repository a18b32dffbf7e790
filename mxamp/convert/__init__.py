"""Saved models and blocks, converted. Imports `patches` and below."""

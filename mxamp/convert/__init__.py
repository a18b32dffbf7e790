"""Conversion of symbols, saved models and blocks. Imports `patches` and below."""

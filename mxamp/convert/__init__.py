"""Conversion of symbols, saved models and blocks to mixed precision. Imports `patches`."""

"""Conversion of symbols, saved models and blocks to mixed precision.

It imports `patches` and the layers below it.
"""

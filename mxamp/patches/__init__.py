"""Monkey patches by which MXNet's own functions apply mixed precision.

They import `scaling` and the layers below it.
"""

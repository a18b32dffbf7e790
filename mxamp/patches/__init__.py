"""Monkey patches by which MXNet's own functions apply mixed precision. Imports `scaling`."""

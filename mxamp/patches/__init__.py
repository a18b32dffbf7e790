"""Patches of MXNet that apply mixed precision to running code. Imports `scaling` and below."""

"""The operator lists, as data of the package: see `mxamp.policy`."""

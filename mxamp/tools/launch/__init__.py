"""Processes that train together on one machine, for `mxamp launch`."""

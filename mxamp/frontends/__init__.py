"""The ways in that other AMP systems have. Imports everything below, but not `mxamp` itself."""

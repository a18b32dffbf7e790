"""The APIs of other AMP systems. Imports everything below, but not `mxamp` itself."""

"""Tools to debug mixed precision: `mxamp.debugging` has their public names."""

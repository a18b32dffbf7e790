"""Facts about an installation, and its problems, for `mxamp doctor`."""

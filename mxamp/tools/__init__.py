"""Tools for debugging, tuning, export and diagnosis, which mxamp's core never imports."""

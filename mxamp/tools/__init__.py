"""Tools for debugging, tuning, export and diagnosis: no module of the core imports them."""

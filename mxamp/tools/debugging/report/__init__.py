"""A page of such files."""

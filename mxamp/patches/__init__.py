"""Mixed precision switched on in running code. Imports `scaling`, `graph` and below."""

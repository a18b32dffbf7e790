"""The command line, one module a subcommand. Imports everything but `mxamp` itself."""

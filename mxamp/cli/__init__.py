"""The command line: a module for each subcommand. Imports all packages but `mxamp` itself."""

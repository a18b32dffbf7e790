"""The command line: a module for each subcommand.

It imports all packages, but not the public module `mxamp` itself.
"""

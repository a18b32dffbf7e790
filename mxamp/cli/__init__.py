"""The command `mxamp`, a module for each of its commands. Imports everything but `mxamp` itself."""

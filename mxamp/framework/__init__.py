"""MXNet and the machine as they are: loading, registry, arrays, patching. Imports `errors`."""

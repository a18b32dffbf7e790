"""Access to MXNet and the machine: import, registry, arrays, patching. Imports `errors`."""

"""Access to MXNet and the machine: import, operators, arrays, patching. Imports `errors`."""

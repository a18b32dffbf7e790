"""Access to MXNet and the machine: import, operators, arrays, monkey patches. Imports `errors`."""

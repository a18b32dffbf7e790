"""Access to MXNet and the machine: import, operators, arrays, monkey patches.

The lowest layer but for `errors`: other packages import it.
"""

"""Prints what the main module says of itself; `python` itself is the oracle."""

import sys

loader, spec = __loader__, __spec__
if spec:
    print(spec.name, spec.origin, spec.parent, spec.has_location, spec.loader is loader)
print(type(loader).__name__, getattr(loader, "path", None))
own = ("__spec__", "__loader__", "sys", "loader", "spec", "own")
print({name: value for name, value in globals().items() if name not in own})
print(sys.argv, sys.path[0], (lambda: 0).__code__.co_filename)
print(sys.modules["__main__"].__dict__ is globals(), ascii("é"))

from . import ndarray as ndarray

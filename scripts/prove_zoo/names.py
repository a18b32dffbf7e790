"""The names of the models that can be proven here, those of packages that are installed."""

import warnings
from typing import Any, Dict, List

warnings.simplefilter("ignore")
from processes import serve  # noqa: E402


def names() -> Dict[str, Any]:
    """Return the names, GluonCV's first."""
    import mxamp  # noqa: F401  # makes GluonCV import on newer NumPy

    found: List[str] = []
    try:
        from gluoncv import model_zoo

        found += model_zoo.get_model_list()
    except ImportError:
        pass
    from numpy_networks import NETWORKS

    found += [f"np:{name}" for name in NETWORKS]
    try:
        import gluonnlp  # noqa: F401

        from language_models import MODELS

        found += [f"nlp:{name}" for name in MODELS]
    except ImportError:
        pass
    return {"names": found}


if __name__ == "__main__":
    serve(names)

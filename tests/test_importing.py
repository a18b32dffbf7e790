"""What `import mxamp` loads, and what it leaves until it is used."""

import json

import pytest

import mxamp as amp
from helpers import python

LATER = ("rich", "click", "mxamp.convert", "mxamp.debugging", "mxamp.tools", "mxamp.frontends")
PROGRAM = """
import gc, json, sys, warnings
warnings.simplefilter("ignore")
frozen = gc.get_freeze_count()  # not 0 in Python 3.12
import mxamp
from mxamp.framework.patching import _stacks
loaded = sorted(sys.modules)
from mxamp.framework.operators import registry
collected = gc.isenabled() and gc.get_freeze_count() == frozen
print(json.dumps([loaded, registry.cache_info().currsize, [*map(str, _stacks)], collected]))
"""


@pytest.mark.slow
def test_import_loads_what_training_needs():
    done = python("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    loaded, read, patched, collected = json.loads(done.stdout)
    assert not {*LATER} & {*loaded}
    assert sum(name.split(".")[0] == "mxamp" for name in loaded) < 15
    assert read == 0, "reading the registry takes 30 ms"
    assert patched == []
    assert collected, "only the command may freeze the objects of a process"


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'mxamp' has no attribute 'autocats'"):
        _ = amp.autocats
    assert not hasattr(amp.debugging, "autocats")

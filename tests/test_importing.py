"""What `import mxamp` loads, and what it leaves until it is used."""

import json
import subprocess
import sys

import pytest

import mxamp as amp

LATER = (
    "rich",
    "click",
    "mxamp.convert",
    "mxamp.debugging",
    "mxamp.tools",
    "mxamp.frontends",
)
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import mxamp as amp
from mxamp.framework.operators import registry
from mxamp.framework.patching import patched
said = {"loaded": sorted(sys.modules), "read": registry.cache_info().currsize, "patched": patched()}
amp.init("float16")
amp.debugging  # what it calls of MXNet below all patches, it has to find below them
from mxamp.tools.debugging.comparing import backward_passes
from mxamp.tools.debugging.numerics import check, findings, gradient_watch
amp.shutdown()
from mxnet import autograd, nd
said["below"] = [
    backward_passes._backward is autograd.backward,
    check._backward is autograd.backward,
    check._mark_variables is autograd.mark_variables,
    gradient_watch._call is autograd.Function.__call__,
    findings._asnumpy is nd.NDArray.asnumpy,
]
print(json.dumps(said))
"""


@pytest.mark.slow
def test_import_loads_what_training_needs():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert not {*LATER} & {*said["loaded"]}
    assert said["read"] == 0  # 30 ms
    assert said["patched"] == []
    assert said["below"] == [True] * 5


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'mxamp' has no attribute 'autocats'"):
        _ = amp.autocats
    assert dir(amp) == sorted(amp.__all__)
    assert all(hasattr(amp, name) for name in amp.__all__)

"""What makes MXNet import on newer Python and NumPy, and without a system CUDA."""

import configparser
import re
import sys
import threading
import types
from unittest import mock

import mxnet as mx
import numpy as np
import pytest

from helpers import ROOT, check_python
from mxamp.errors import InstallError
from mxamp.framework import compat as _compat

OLD_NUMPY = tuple(map(int, np.__version__.split(".")[:2])) < (1, 24)


@pytest.mark.slow
@pytest.mark.skipif(not OLD_NUMPY, reason="names are missing here")
def test_nothing_is_changed_where_nothing_is_missing():
    check_python(
        """
        import warnings
        import numpy
        warnings.simplefilter("ignore")
        before = dict(vars(numpy))
        import mxnet
        from mxamp.framework import compat as _compat
        names = dict(vars(numpy))
        _compat.prepare_import()
        assert dict(vars(numpy)) == names
        assert all(vars(numpy)[n] is v for n, v in before.items())
        """
    )


@pytest.fixture
def modules():
    """The modules, put back in their order: at exit Python clears them from the last to the first.

    MXNet put back behind the tests' modules would be cleared while they still hold arrays.
    """
    with mock.patch.dict(sys.modules):
        yield sys.modules


def test_an_import_that_failed_is_recognized(modules):
    del modules["mxnet"]
    with pytest.raises(InstallError, match="with `import mxamp` first"):
        _compat.import_mxnet()


@pytest.fixture
def forgotten(modules):
    """MXNet is not imported, nor has an import failed."""
    for name in [n for n in modules if n.split(".")[0] == "mxnet"]:
        del modules[name]


@pytest.mark.parametrize(
    "code, words",
    [
        ("__version__ = '2.0.0'", "MXNet 2.0.0 is installed, but mxamp needs MXNet 1.9.1: pip"),
        ("__version__ = '1.9.10'", "MXNet 1.9.10 is installed"),
        ("raise RuntimeError('bad\\nwhy')", "can't be imported: why. mxamp needs 1.9.1"),
    ],
)
def test_mxnet_1_9_1_alone_is_imported(code, words, tmp_path, monkeypatch, forgotten):
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InstallError, match=words):
        _compat.import_mxnet()


def test_an_import_that_is_blocked(modules, forgotten):
    modules["mxnet"] = None
    with pytest.raises(InstallError, match="MXNet is not installed.*pip install mxnet==1.9.1"):
        _compat.import_mxnet()


def bare_numpy(version):
    """Return what NumPy is without the names that it has removed."""
    bare = types.ModuleType("numpy")
    bare.__version__ = version
    bare.options = {}
    for name in ("all", "any", "prod", "cumprod", "round", "sort", "isin", "ravel", "trapezoid"):
        setattr(bare, name, getattr(np, name, np.sort))
    bare.set_printoptions = lambda **options: bare.options.update(options)
    bare.compat = types.ModuleType("numpy.compat")
    bare.bool = "kept"
    return bare


def test_restoring_numpy():
    bare = bare_numpy("2.4.0")
    _compat._restore_numpy(bare)
    assert bare.bool == "kept"
    assert bare.int is int
    assert float("inf") == bare.PINF
    assert bare.compat.basestring is str
    assert bare.options == {"legacy": "1.25"}
    assert bare.msort(np.array([2, 1])).tolist() == [1, 2]
    assert bare.in1d(np.array([1, 2]), [2]).tolist() == [False, True]
    with pytest.raises(AttributeError, match="numpy_financial"):
        bare.npv()


def test_packing_records_without_tostring(monkeypatch):
    """Warnings are errors here: until the functions are changed, NumPy 1.19 to 2.2 refuse too."""
    recordio, image = mx.recordio, np.array([[1, 2]], np.uint8)
    encoder = types.SimpleNamespace(
        IMWRITE_PNG_COMPRESSION=16, imencode=lambda suffix, pixels, parameters: (True, pixels)
    )
    monkeypatch.setattr(recordio, "cv2", encoder)
    codes = {function: function.__code__ for function in (recordio.pack, recordio.pack_img)}
    try:
        _compat._restore_packing(types.SimpleNamespace(ndarray=object), recordio)
        labels = recordio.IRHeader(0, [1.5, 2.5], 7, 0)
        header, packed = recordio.unpack(recordio.pack(labels, b"abc"))
        assert header.label.tolist() == [1.5, 2.5]
        assert (header.flag, header.id, packed) == (2, 7, b"abc")
        number = recordio.IRHeader(0, 4, 7, 0)
        header, packed = recordio.unpack(recordio.pack_img(number, image, img_fmt=".png"))
        assert (header.label, packed) == (4, b"\1\2")
    finally:
        for function, code in codes.items():
            function.__code__ = code


def test_numpy_s_range_is_that_of_the_metadata():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")  # which setuptools rewrites for source distributions
    wanted = re.findall(r"\nnumpy(.*)", config["options"]["install_requires"])
    assert wanted[0] == f">={_compat.NUMPY_FROM},<{_compat.NUMPY_BELOW}"
    pins = re.findall(r"\nnumpy==([\d.]+)", (ROOT / "scripts" / "constraints.txt").read_text())
    for bound in re.findall(r">=([\d.]+)", " ".join(wanted[1:])):
        assert _compat.release(_compat.NUMPY_FROM) <= _compat.release(bound)
        assert _compat.release(bound) <= _compat.release(pins[-1])
    for pin in pins:
        release = _compat.release(pin)
        assert _compat.release(_compat.NUMPY_FROM) <= release
        assert release < _compat.release(_compat.NUMPY_BELOW)


@pytest.mark.parametrize(
    "version, fits",
    [("1.16.6", False), ("2.6.0rc1", False), ("2.10.0", False), ("1.17.3", True), ("2.5.5", True)],
)
def test_a_numpy_that_is_too_old_or_too_new(version, fits, modules):
    modules["numpy"] = bare_numpy(version)
    if fits:
        _compat.prepare_import()
    else:
        with pytest.raises(InstallError, match=f'NumPy {version} .*pip install "numpy>=1.17,<2.6"'):
            _compat.prepare_import()
    assert hasattr(modules["numpy"], "int") == fits


def test_numbers_of_numpy_in_operators_of_other_threads():
    """NumPy 2 prints np.int64(2), which MXNet can't read, and keeps its options for each thread."""
    made = []
    shape = (np.int64(2), np.int64(3))
    thread = threading.Thread(target=lambda: made.append(mx.nd.zeros(shape).shape))
    thread.start()
    thread.join()
    assert made == [(2, 3)]


def test_standing_in_for_distutils(modules, monkeypatch):
    for name in ("distutils", "distutils.version"):
        modules.pop(name, None)
    monkeypatch.setattr(_compat.importlib.util, "find_spec", lambda name: None)
    _compat._restore_distutils()
    _compat._restore_distutils()  # a second time it is there
    version = sys.modules["distutils.version"].LooseVersion
    assert version("1.9.1") < version("1.10") <= version("1.10")
    assert version("2.0") > version("1.26.4")

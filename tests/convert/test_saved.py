"""Saved models: damaged files, and two files replaced as one."""

import errno
import itertools
import json
import os
import signal
from pathlib import Path

import mxnet as mx
import pytest
from mxnet import gluon

import mxamp as amp
from helpers import initialized, randn
from mxamp.convert import files as convert_files_module
from mxamp.convert.saved import load_model
from mxamp.framework import files

# MXNet's, of any symbol with casts.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot decide type")

PART = ("symbol.json", "0000.params")
BFLOAT16 = {"target_dtype": "bfloat16"}


def model(number):
    """Return a model of the same layers, names and shapes each time, whose outputs are number squared."""
    x = mx.sym.BatchNorm(mx.sym.var("data"), name="bn")
    symbol = mx.sym.FullyConnected(x, num_hidden=2, no_bias=True, name="fc") * float(number)
    args = {"fc_weight": mx.nd.full((2, 4), number / 4)}
    args.update(bn_gamma=mx.nd.ones((4,)), bn_beta=mx.nd.zeros((4,)))
    return symbol, args, {"bn_moving_mean": mx.nd.zeros((4,)), "bn_moving_var": mx.nd.ones((4,))}


@pytest.fixture
def folder(tmp_path):
    for number in (3, 5):
        mx.model.save_checkpoint(str(tmp_path / f"model{number}"), 0, *model(number))
    mx.nd.waitall()
    out = tmp_path / "out"
    out.mkdir()
    return out


def convert(folder, number, **options):
    amp.convert_files(
        folder.parent / f"model{number}", folder / "m", force=True, **{**BFLOAT16, **options}
    )


def content(folder):
    paths = [folder / f"m-{part}" for part in PART]
    return [path.read_bytes() if path.exists() else None for path in paths]


def output(prefix):
    """Return what plain MXNet computes with a saved model."""
    net = gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params")
    return round(float(net(mx.nd.ones((1, 4))).asnumpy()[0, 0]), 1)


# ---------------------------------------------------------------------- damaged files


#: Changes of a symbol's data, or what stands in its place.
DAMAGED = {
    "a cycle": lambda data: data["nodes"][1].update(inputs=[[3, 0, 0]]),
    "a negative index": lambda data: data["nodes"][3].update(inputs=[[-1, 0, 0]]),
    "a bad head": lambda data: data.update(heads=[[90, 0, 0]]),
    "no name": lambda data: data["nodes"][0].pop("name"),
    **{str(text[:9]): text
       for text in (b"", b'{"nodes": [', b"[" * 100000, b"\xff\xfe\x00", b"[]", b"null")},
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_damaged_symbols_are_refused_in_one_sentence(folder, damage):
    path = folder.parent / "model3-symbol.json"
    if callable(damage):
        data = json.loads(path.read_text())
        damage(data)
        damage = json.dumps(data).encode()
    path.write_bytes(damage)
    with pytest.raises(amp.ArgumentError, match=r"model3-symbol\.json") as raised:
        load_model(folder.parent / "model3")
    assert "\n" not in str(raised.value)


def save(net, data, folder):
    """Save a net as a model, `m`."""
    initialized(net, hybridize=True)(data)
    net.export(str(folder / "m"))


def gluon_model(folder):
    """Save a small convolutional net; return the content of its parameter file."""
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(8, 3), gluon.nn.BatchNorm(), gluon.nn.GlobalAvgPool2D())
        net.add(gluon.nn.Dense(6), gluon.nn.Dense(2))
    save(net, randn(1, 3, 8, 8), folder)
    return mx.nd.load(str(folder / "m-0000.params"))


@pytest.mark.parametrize("name, shape, wanted", [
    ("arg:net_conv0_weight", (8, 3, 5, 5), "8 x any x 3 x 3"), ("arg:net_conv0_bias", (9,), "8"),
    ("arg:net_batchnorm0_gamma", (4,), "8"), ("aux:net_batchnorm0_running_var", (16,), "8"),
    ("arg:net_dense0_weight", (6, 9), "6 x 8"), ("arg:net_dense1_weight", (2, 5), "2 x 6"),
    ("arg:net_dense1_bias", (3,), "2"), ("arg:net_dense0_weight", (6, 8, 1), "6 x 8"),
])  # fmt: skip
def test_a_parameter_of_another_shape_is_refused(name, shape, wanted, folder):
    params = gluon_model(folder)
    load_model(folder / "m")
    mx.nd.save(str(folder / "m-0000.params"), {**params, name: mx.nd.ones(shape)})
    with pytest.raises(amp.ArgumentError) as raised:
        amp.convert_files(folder / "m", folder / "out", **BFLOAT16)
    assert f"holds {name[4:]!r} of shape {shape}, which has to be {wanted} in" in str(raised.value)
    assert sorted(os.listdir(folder)) == ["m-0000.params", "m-symbol.json"]


def test_a_parameter_that_lacks_or_that_nothing_reads(folder, caplog):
    params = gluon_model(folder)
    mx.nd.save(str(folder / "m-0000.params"), {**params, "arg:head_weight": mx.nd.ones(2)})
    load_model(folder / "m")
    assert "m-0000.params' holds head_weight, which the model does not read" in caplog.text
    for name in params:
        rest = {other: array for other, array in params.items() if other != name}
        mx.nd.save(str(folder / "m-0000.params"), rest)
        with pytest.raises(amp.ArgumentError, match=f"lacks {name[4:]} of '.*m-symbol.json'"):
            load_model(folder / "m")


@pytest.mark.parametrize("net, data", [
    (gluon.rnn.LSTM(4, input_size=3), (5, 2, 3)),
    (gluon.nn.Dense(4, flatten=False), (2, 5, 3)),
    (gluon.nn.Conv1D(4, 3, layout="NCW"), (2, 3, 9)),
    (gluon.nn.Embedding(7, 4), (2, 5)),
    (gluon.nn.LayerNorm(), (2, 5, 3)),
    (gluon.nn.PReLU(), (2, 3)),
], ids=repr)  # fmt: skip
def test_parameters_of_any_layer_fit(net, data, folder):
    save(net, mx.nd.ones(data), folder)
    load_model(folder / "m")


# ---------------------------------------------------------------------- errors amid


EIO = OSError(errno.EIO, os.strerror(errno.EIO))
REPLACE = os.replace


def counted_steps(act):
    """Return an os.replace that calls `act` with the number of each call first."""
    steps = itertools.count(1)

    def replace(*paths):
        act(next(steps))
        REPLACE(*paths)

    return replace


@pytest.mark.parametrize("error", [EIO, KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_failed_move_leaves_the_old_pair(folder, step, old, error, monkeypatch):
    if old:
        convert(folder, 3)
    elif step > 2:
        return  # no old files to set aside
    before = content(folder)

    def fail(number):
        if number == step:
            raise error

    monkeypatch.setattr(os, "replace", counted_steps(fail))
    with pytest.raises(amp.WriteError if error is EIO else KeyboardInterrupt):
        convert(folder, 5)
    assert content(folder) == before
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    convert(folder, 5)
    assert output(folder / "m") == 25
    assert sorted(os.listdir(folder)) == sorted(f"m-{part}" for part in PART)


@pytest.mark.parametrize("link", PART)
def test_one_file_that_is_a_link_to_the_other(folder, link):
    convert(folder, 3)
    (other,) = set(PART) - {link}
    (folder / f"m-{link}").unlink()
    (folder / f"m-{link}").symlink_to(f"m-{other}")
    before = content(folder)
    with pytest.raises(amp.WriteError, match="differs from the content written"):
        convert(folder, 5)
    assert content(folder) == before


def test_files_that_appear_during_a_conversion_are_not_overwritten(folder, monkeypatch):
    real = convert_files_module.converted_model

    def late(*arguments):
        (folder / "m-symbol.json").write_text("another's")
        return real(*arguments)

    monkeypatch.setattr(convert_files_module, "converted_model", late)
    with pytest.raises(amp.ArgumentError, match="is there already"):
        amp.convert_files(folder.parent / "model3", folder / "m", **BFLOAT16)
    assert os.listdir(folder) == ["m-symbol.json"]


# ---------------------------------------------------------------------- kills


def write(paths, text):
    with files.replaced_files(paths, lambda _: None) as written:
        for path in written:
            path.write_text(text)


def die_at(stage):
    """Kill this process at a step of a replacement: 4 renames, then 2 removals of old files."""

    def act(number):
        if number == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    removal, real = itertools.count(5), Path.unlink

    def unlink(path, **options):
        if ".mxamp-old" in path.name and path.exists():
            act(next(removal))
        real(path, **options)

    os.replace, Path.unlink = counted_steps(act), unlink


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_killed_at_any_step_leaves_the_old_pair_none_or_the_new_one(tmp_path, linked):
    folder, places = tmp_path / "folder", tmp_path / "out"
    folder.mkdir()
    places.mkdir()
    paths = [folder / f"m-{part}" for part in PART]
    for path in paths if linked else ():
        path.symlink_to(places / path.name)
    found = []
    for stage in range(1, 8):
        write(paths, "old")
        child = os.fork()
        if not child:
            try:
                die_at(stage)
                write(paths, "new")
            finally:
                os._exit(0)
        killed = os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert killed == (stage <= 6)
        there = [path.read_text() if path.exists() else None for path in paths]
        found.append(there[0])
        # Without the symbol, nobody reads the parameters.
        assert there[0] is None or there[0] == there[1]
        real = [Path(os.path.realpath(path)) for path in paths]
        kept = [one.read_text() for one in files.leftovers(real[0])]
        assert kept == (["old"] if stage in (2, 3, 4, 5) else [])
    assert found == ["old", None, None, None, "new", "new", "new"]
    for path in (*folder.iterdir(), *places.iterdir()):
        os.utime(path, (0, 0), follow_symlinks=False)  # old enough to be orphans
    write(paths, "last")
    assert {path.read_text() for path in paths} == {"last"}
    names = sorted(path.name for path in paths)
    assert sorted(os.listdir(folder)) == names
    assert sorted(os.listdir(places)) == (names if linked else [])


def test_a_reader_hears_of_a_killed_conversion(folder, monkeypatch):
    convert(folder, 3)
    (folder / "m-symbol.json").rename(folder / ".m-symbol.json.mxamp-old-m-0000.params")
    with pytest.raises(amp.ArgumentError, match="has left .m-symbol.json.mxamp-old"):
        load_model(folder / "m")
    with pytest.raises(amp.ArgumentError, match="is there already"):
        amp.convert_files(folder.parent / "model5", folder / "m", **BFLOAT16)
    os.rename(folder / ".m-symbol.json.mxamp-old-m-0000.params", folder / "m-symbol.json")
    assert output(folder / "m") == 9


def test_a_weight_that_is_data_is_no_missing_parameter(folder):
    """As of a network that another network computes the weights of."""
    data, weight, prefix = mx.sym.var("data"), mx.sym.var("hyper_weight"), str(folder / "hyper")
    symbol = mx.sym.FullyConnected(data, weight, num_hidden=4, no_bias=True, name="made")
    symbol = mx.sym.FullyConnected(symbol, num_hidden=2, no_bias=True, name="fc")
    mx.model.save_checkpoint(prefix, 0, symbol, {"fc_weight": mx.nd.ones((2, 4))}, {})
    assert "hyper_weight" in load_model(prefix)[0].list_inputs()
    mx.model.save_checkpoint(prefix, 0, symbol, {}, {})
    with pytest.raises(amp.ArgumentError, match="lacks fc_weight of"):
        load_model(prefix)

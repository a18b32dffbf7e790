"""Conversion from files to files: what is written, what is checked, and what is refused."""

import os

import mxnet as mx
import pytest
from mxnet import nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import kind, randn, sequential, untuned
from mxamp.convert.saved import load_model

PART = ("symbol.json", "0003.params")
WEIGHT, BIAS = randn(4, 8), randn(4, seed=1)
ONES = {"data": nd.ones((2, 8))}


@pytest.fixture
def folder(tmp_path):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
    params = {"fc_weight": WEIGHT, "fc_bias": BIAS}
    mx.model.save_checkpoint(str(tmp_path / "net"), 3, symbol, params, {})
    return tmp_path


def convert(folder, out="low", **options):
    return amp.convert_files(folder / "net", folder / out, 3, **options)


def written(folder, name="low"):
    return [(folder / f"{name}-{part}").read_bytes() for part in PART]


@pytest.mark.parametrize("cast", [False, True])
def test_files(folder, dtype, cast):
    options = {"policy": untuned(dtype), "cast_optional_params": cast}
    done = convert(folder, check_inputs=ONES, **options)
    assert (done.symbol.name, done.params.name) == ("low-symbol.json", "low-0003.params")
    sizes = [sum(map(len, written(folder, name))) for name in ("net", "low")]
    assert [done.bytes_before, done.bytes_after] == sizes
    assert 0 < done.errors[0].relative < 0.02
    symbol, args, _ = mx.model.load_checkpoint(str(folder / "low"), 3)
    assert "amp_cast" in symbol.tojson(remove_amp_cast=False)
    assert {kind(array) for array in args.values()} == {dtype if cast else "float32"}
    assert cast or (args["fc_weight"].asnumpy() == WEIGHT.asnumpy()).all()
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("stored", ["float16", "float32"])
@pytest.mark.parametrize("taken", ["float16", "float32"])
def test_a_model_in_half_precision_is_compared_with_its_float32_form(folder, stored, taken):
    """MXNet's CPU kernels don't run a dense layer in float16."""
    params = {"fc_weight": WEIGHT.astype(stored), "fc_bias": BIAS.astype(stored)}
    inputs = [mx.sym.Cast(mx.sym.var(name), dtype="float16") for name in ("data", *params)]
    symbol = mx.sym.Cast(mx.sym.FullyConnected(*inputs, num_hidden=4, name="fc"), dtype="float32")
    mx.model.save_checkpoint(str(folder / "net"), 3, symbol, params, {})
    given = {"check_inputs": {"data": ONES["data"].astype(taken)}, "input_dtypes": {"data": taken}}
    for dtype in ("bfloat16", "float32"):
        done = convert(folder, dtype, target_dtype=dtype, **given)
        assert done.errors[0].relative < 0.02


@pytest.mark.parametrize(
    "change, words",
    [
        ({"prefix": "other"}, "no file"),
        ({"epoch": 0}, "no file"),
        ({"out": "none/low"}, "no folder"),
        ({"excluded_sym_names": ["f"]}, "'f'"),
        ({"input_dtypes": {"x": "int32"}}, "'x'"),
        ({"check_inputs": {}}, "without a value"),
        *(({"tolerance": value}, "tolerance` must be") for value in (0, -1)),
    ],
)
def test_failures_write_nothing(folder, change, words):
    options = {"prefix": "net", "out": "low", "epoch": 3, "target_dtype": "bfloat16", **change}
    options.update({name: folder / options[name] for name in ("prefix", "out")})
    with pytest.raises(amp.ArgumentError, match=words):
        amp.convert_files(**options)
    assert sorted(os.listdir(folder)) == ["net-0003.params", "net-symbol.json"]


def test_a_model_that_overflows_is_not_written(folder):
    symbol, args, _ = load_model(folder / "net", 3)
    args["fc_weight"][:] = 1e5
    mx.model.save_checkpoint(str(folder / "net"), 3, symbol, args, {})
    with pytest.raises(amp.CheckError, match="'fc_output' has .* NaN in 8 elements") as failed:
        convert(folder, policy=untuned("float16"), check_inputs=ONES)
    assert [(error.name, error.lost) for error in failed.value.errors] == [("fc_output", 8)]
    assert not list(folder.glob("low*"))


@pytest.mark.parametrize("way", ["links", "the same"])
@pytest.mark.parametrize("part", PART)
def test_the_model_itself_is_never_overwritten(folder, way, part):
    before = written(folder, "net")
    if way == "links":
        (folder / f"low-{part}").symlink_to(f"net-{part}")
    out = "net" if way == "the same" else "low"
    with pytest.raises(amp.ArgumentError, match="the model's own file"):
        convert(folder, out, force=True)
    assert written(folder, "net") == before


@pytest.mark.parametrize("way", ["cut off", "no space", "changed"])
def test_a_failed_write_leaves_the_old_files(folder, way, monkeypatch):
    convert(folder, target_dtype="bfloat16")
    before, save = written(folder), nd.save

    def fails(path, arrays):
        if way == "no space":
            raise OSError(28, "No space left on device")
        save(path, {**arrays, "arg:fc_bias": arrays["arg:fc_bias"] + (way == "changed")})
        if way == "cut off":
            os.truncate(path, 40)

    monkeypatch.setattr(nd, "save", fails)
    with pytest.raises(amp.WriteError, match="unchanged") as raised:
        convert(folder, target_dtype="bfloat16", force=True)
    assert "\n" not in str(raised.value)
    assert written(folder) == before
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_models_of_numpy_semantics(tmp_path, dtype):
    """Their output is of a shape that MXNet's classic arrays don't have."""
    mx.npx.set_np()
    layers = nn.Dense(4), nn.HybridLambda(lambda F, x: F.np.sum(F.np.tanh(x)))
    net, x = sequential(*layers, init=mx.init.Xavier(), hybridize=True), mx.np.ones((2, 4))
    net(x)
    net.export(str(tmp_path / "net"))
    mx.npx.reset_np()
    files = tmp_path / "net", tmp_path / "low"
    done = amp.convert_files(*files, policy=untuned(dtype), check_inputs={"data": x})
    assert done.errors[0].shape == ()
    assert done.errors[0].relative < 0.05


def test_a_folder_that_is_missing_or_can_not_be_listed_is_named(folder, monkeypatch):
    with pytest.raises(amp.ArgumentError, match="there is no folder '.*none' that you may list"):
        amp.convert_files(folder / "none" / "net", folder / "low")
    isfile, closed = os.path.isfile, (str(folder), folder)
    # The tests may run as root, who may list every folder.
    monkeypatch.setattr(os, "access", lambda path, _: path not in closed)
    monkeypatch.setattr(os.path, "isfile", lambda path: path.parent != folder and isfile(path))
    with pytest.raises(amp.ArgumentError, match=f"there is no folder '{folder}' that you may"):
        convert(folder)

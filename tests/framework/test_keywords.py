"""Calls written as for another library, or with a mistake: one sentence says what to write."""

import re
import sys
from operator import attrgetter

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.contrib.amp.loss_scaler import LossScaler as ContribScaler

import mxamp as amp
from helpers import initialized, scaled_backward, scaled_trainer, sequential
from mxamp.framework.data import own_tables
from mxamp.framework.keywords import checked_call
from mxamp.framework.operators import registry

SYMBOL = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
X = mx.nd.ones((2, 3))
MODEL = SYMBOL, {"fc_weight": X, "fc_bias": mx.nd.ones(2)}, {}
GPU = amp.Policy.default("float16", "gpu")


def net():
    return initialized(gluon.nn.Dense(4, in_units=3))


def deferred():
    return initialized(gluon.nn.Conv2D(4, 3))


class Adds(gluon.Block):
    """A block of two inputs that is no HybridBlock."""

    def forward(self, x, y):
        return x + y


def compare_models(inputs, **options):
    return amp.compare_models(MODEL, MODEL, inputs, **options)


LOSS = gluon.loss.L2Loss()


def trainer():
    return gluon.Trainer(net().collect_params(), "sgd")


WRONG = [
    # keywords that no parameter has
    (lambda: amp.init(dtype="bfloat16"), "unknown argument of init 'dtype'; the closest is 'target_dtype'"),
    (lambda: amp.autocast("cuda", cache_enabled=True), "'cuda': leave it out: the arrays say the device; 'cache_enabled': leave it out"),
    (lambda: amp.GradScaler(init_scaling=8), "unknown argument of GradScaler 'init_scaling'; the closest are 'init_scale'"),
    (lambda: amp.GradScaler(enabeld=False), "unknown argument of GradScaler 'enabeld'; the closest is 'enabled'"),
    (lambda: amp.init_trainer(trainer(), loss_scale=8), "the closest is 'loss_scaler'"),
    (lambda: amp.scale_loss([], scaled_trainer(net().collect_params(), amp.LossScaler())).__enter__(), r"a loss must be an NDArray, .*, not \[\]"),
    (lambda: amp.scale_loss(X, trainer=trainer()), "the closest is 'optimizer_or_trainer'"),
    # values of the wrong kind
    (lambda: amp.autocast(print), "must be a dtype, not the function print"),
    (lambda: amp.convert_model(SYMBOL, {"fc_weight": np.ones((2, 3))}, {}), "with NDArrays, not 'fc_weight': an ndarray"),
    (lambda: amp.export_onnx("mod", "model.onnx", {"data": X}), "a saved model must be .*not 'mod'"),
    (lambda: amp.init_trainer(trainer(), ContribScaler()), "or NoScaler, not a LossScaler"),
    (lambda: amp.LossScaler("large"), "init_scale must be a positive finite number, not 'large'"),
    (lambda: amp.decorate("sgd", init_loss_scaling="dynamic"), "must be a positive finite number"),
    (lambda: amp.init("bfloat16", tuned="no"), "tuned must be True or False"),
    (lambda: amp.Policy.default("bfloat16", [mx.cpu(), mx.gpu()]), r"one kind of device .*, not \[cpu\(0\), gpu\(0\)\]"),
    (lambda: amp.Policy.default("bfloat16", "cuda"), "device must name one kind of device .'cpu' or 'gpu'"),
    (lambda: amp.init(GPU), "give a policy by its keyword, policy="),
    (lambda: amp.init("bfloat16", policy=GPU), "the policy is for float16, but bfloat16 is given beside it"),
    (lambda: amp.init(policy=GPU, fp32_ops=["dot"]), "a policy contains operator lists"),
    (lambda: amp.init(policy=GPU, ctx=mx.cpu()), "the policy is for gpu, but cpu is given"),
    (lambda: amp.init(policy="p.toml"), "policy must be an mxamp.Policy, .*not 'p.toml'"),
    (lambda: amp.init("float64"), "must be 'float16', 'bfloat16', 'float32' or 'auto', not 'float64'"),
    (lambda: amp.debugging.check_numerics("stop"), "on must be 'raise'"),
    (lambda: amp.decorate(trainer()), "for a trainer there is init_trainer"),
    (lambda: amp.decorate("adamw2"), "closest are 'adam'"),
    (lambda: compare_models(X), "inputs must map names"),
    (lambda: compare_models({}), "without a value: data"),
    (lambda: compare_models({"data": np.full((2, 3), np.nan)}), "NaN, infinity or beyond float32 in 6 elements"),
    (lambda: compare_models({"data": mx.nd.array([[1, np.inf, 1]]).astype(amp.bfloat16)}), "in 1 element:"),
    (lambda: compare_models({"data": [["a"]]}), "must be an array of numbers"),
    (lambda: compare_models({"data": (2, 3)}), r"must be an array of numbers, not \(2, 3\)"),  # sizes, by mistake
    (lambda: compare_models({"data": mx.nd.ones((2, 5))}), r"the shapes {'data': \(2, 5\)} do not fit the model"),
    (lambda: compare_models({}, ctx="cpu"), "must be a Context, such as mx.cpu"),
    (lambda: amp.random_inputs(MODEL), "the shapes of data can't be inferred"),
    (lambda: amp.random_inputs(MODEL, {"data": (0, 3)}), "sizes above 0"),
    (lambda: amp.random_inputs(MODEL, {"data": (2, 5)}), "Shape inconsistent"),
    (lambda: amp.random_inputs(MODEL[::-1], {}), r"\(symbol, arg_params, aux_params\)"),
    (lambda: amp.export_onnx(Adds(), "model.onnx", (X, X)), r"must be a HybridBlock, not Adds\("),
    (lambda: amp.convert_hybrid_block(net(), ctx="cpu", example_inputs=X), "ctx must be a Context, or a list"),
    (lambda: amp.convert_hybrid_block(net(), input_dtypes=["x"], example_inputs=X), "input_dtypes must map names"),
    (lambda: amp.explain(net(), input_dtypes=["x"], example_inputs=X), "input_dtypes must map names to dtypes, not"),
    (lambda: amp.explain([1]), "takes a Symbol"),
    (lambda: amp.explain(SYMBOL, policy=GPU, input_shapes={"dato": (1, 2)}), "'data'"),
    (lambda: amp.explain(SYMBOL, policy=GPU, excluded_sym_names=["fcc"]), "'fc'"),
    (lambda: amp.explain(SYMBOL, mode=3), "'converted', 'inference' or 'training', not 3"),
    (lambda: amp.explain(SYMBOL, "bfloat16", policy=GPU), "the policy is for float16, but bfloat16"),
    (lambda: amp.explain(SYMBOL, policy=GPU).filter(precision="flot32"), "or 'as is', not 'flot32'"),
    (lambda: amp.explain(SYMBOL, params=3), "params must map names to NDArrays, not 3"),
    (lambda: amp.explain(SYMBOL, params={"data": None}), "params must map to NDArrays, but 'data' is None"),
    (lambda: amp.explain(SYMBOL, input_dtypes={"data": None}), "dtype of input 'data' must be in .*, not None"),
    (lambda: amp.tune(net(), (X, X), metric="acuracy"), "unknown metric 'acuracy'; the closest are 'accuracy'"),
    (lambda: amp.random_inputs((SYMBOL, {}, {}), dtypes=["x"]), "dtypes must map names to dtypes"),
    (lambda: amp.register_custom_operator(3), "op_type must be a name, not 3"),
    (lambda: amp.convert_symbol(SYMBOL, {3: "y"}), "the target dtype must be"),
    (lambda: amp.convert_symbol(net()), "must be a Symbol, not Dense"),
    (lambda: amp.convert_symbol(SYMBOL, excluded_sym_names=["f"]), "'fc'.*end in _fwd"),
    (lambda: amp.convert_symbol(SYMBOL, excluded_sym_names=["xyz"]), "there is 'fc'"),
    (lambda: amp.convert_symbol(SYMBOL, excluded_sym_names=3), "list of them"),
    (lambda: amp.convert_symbol(SYMBOL, "float32", fp32_ops=["softmax"]), "leave out `policy` and the operator lists"),
    (lambda: amp.convert_symbol(SYMBOL, "float32", policy=GPU), "leave out `policy` and the operator lists"),
    (lambda: amp.convert_symbol(SYMBOL, data_names=["dat"]), "'data'"),
    (lambda: amp.convert_symbol(SYMBOL, input_dtypes={"dta": "int32"}), "'data'"),
    (lambda: amp.convert_model(SYMBOL, {"fc_bias": X}, {}, input_dtypes={"fc_bias": "int8"}), "'fc_bias' is a parameter in float32"),
    (lambda: amp.convert_hybrid_block(SYMBOL), "HybridBlock"),
    (lambda: amp.convert_bucketing_module(None), "BucketingModule"),
    (lambda: amp.register_half_function("layers", "dense"), "must be a module, not 'layers'"),
    (lambda: amp.register_custom_operator("mine", "low"), "kind must be 'half', .*not 'low'"),
    (lambda: amp.convert_symbol(SYMBOL, "float8"), "'bfloat16' or 'float32', not 'float8'"),
    # shapes, and arrays of wrong shapes
    (lambda: amp.convert_hybrid_block(net(), "bfloat16", example_inputs=(2, 3)), r"must be an NDArray, or .*, not \(2, 3\)"),
    (lambda: amp.convert_hybrid_block(deferred(), "bfloat16", example_inputs=X), r"of shape \(2, 3\): .*Input data should be 4D"),
    (lambda: amp.debugging.compare((SYMBOL, {}, {}), X), "takes a Block.*SymbolBlock"),
    (lambda: amp.debugging.compare(net(), []), "no batch"),
    (lambda: amp.debugging.compare(net(), [(np.ones((2, 3)),)]), "NDArrays, not an ndarray of shape"),
    (lambda: amp.debugging.compare(net(), (2, 3)), r"a batch must be an array or .*, not \(2, 3\)"),
    # the label in a batch, without a loss
    (lambda: amp.tune(net(), [(X, X)]), r"on this batch of 2 arrays: .*the label too only where a loss"),
    (lambda: amp.benchmark(net(), (X, X)), r"on this batch of 2 arrays: .*the label too only where a loss"),
    (lambda: amp.debugging.compare(net(), [(X, X)]), r"on this batch of 2 arrays: .*A batch is a tuple .* A list holds"),
    (lambda: amp.tune(Adds(), (X, X, X, X), LOSS), r"on this batch of 3 arrays: "),
    (lambda: amp.tune(net(), X, LOSS), "a loss or metric, label last"),
    (lambda: amp.tune(net(), (X, X), "sce"), "loss must be a function from .*, not 'sce'"),
    (lambda: amp.tune(net(), (X, X), lambda output, label: 0.5), "loss must be .*, not 0.5"),
    (lambda: amp.explain(net(), "bfloat16", example_inputs=(X, X)), "does not run on a call with arrays of shape"),
    # operators by the names of layers and other libraries
    (lambda: GPU.override(conditional=["Activation"]), "conditional operators must be"),
    (lambda: GPU.override(conditional=[("Activation", "act_typ", ["relu"])]), "the closest is 'act_type'"),
    (lambda: GPU.override(low="dot"), "the low operators must be a list of names, not 'dot'"),
    (lambda: GPU.override(fp32=[gluon.nn.Dense]), "the class Dense; MXNet calls it 'FullyConnected'"),
    (lambda: GPU.override(fp32=[mx.nd.softmax]), "the function softmax; MXNet calls it 'softmax'"),
    (lambda: GPU.override(fp32=["nn.Conv2DTranspose"]), "MXNet calls it 'Deconvolution'"),
    (lambda: GPU.rule("LSTM"), "MXNet calls it 'RNN'"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_call_says_what_to_write(number):
    call, said = WRONG[number]
    with pytest.raises(amp.ArgumentError, match=said) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize("call", [amp.tune, amp.debugging.compare])
def test_type_errors_of_a_net_are_the_cause(call):
    class Fails(gluon.HybridBlock):
        def hybrid_forward(self, _, x):
            return x + len(5)

    with pytest.raises(amp.ArgumentError, match="of 1 array: .*'int' has no len") as raised:
        call(Fails(), X)
    assert isinstance(raised.value.__cause__, TypeError)


def test_other_type_errors_are_pythons():
    @checked_call
    def fails(one):
        raise TypeError(f"from inside, with {one}")

    with pytest.raises(TypeError, match="from inside, with 1"):
        fails(one=1)
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        fails(1, 2)


def test_checks_decorate_functions():
    @amp.debugging.check_numerics()
    def step():
        return mx.nd.log(mx.nd.array([-1.0]))

    for _ in range(2):
        with pytest.raises(amp.debugging.NumericsError):
            step()


def stepped(*sizes, optimizer="adam"):
    """A trainer after one step, of layers between these sizes."""
    pairs = zip(sizes, sizes[1:])
    block = sequential(*(gluon.nn.Dense(n, in_units=m, use_bias=False) for m, n in pairs))
    made = scaled_trainer(block.collect_params(), amp.LossScaler(), optimizer)
    scaled_backward(lambda: block(X).sum(), made)
    made.step(1)
    return made


@pytest.mark.parametrize("optimizer", ["adam", "groupadagrad"])
def test_states_of_other_shapes_are_an_error(optimizer, tmp_path):
    file = str(tmp_path / "other.states")
    stepped(3, 5, 2, optimizer=optimizer).save_states(file)
    stepped(3, 5, 2, optimizer=optimizer).load_states(file)
    made = stepped(3, 4, 2, optimizer=optimizer)
    before = made._updaters[0].states
    with pytest.raises(amp.ArgumentError, match=r"holds .*array\(5, .\).* keeps .*array\(4, .\)"):
        made.load_states(file)
    assert made._updaters[0].states is before


def test_rules_are_found_by_any_name_of_an_operator():
    assert GPU.rule("_npx_fully_connected") is GPU.rule("FullyConnected")


def test_every_other_name_stands_for_an_operator():
    names = own_tables("operators")["gluon_layers"]
    assert set(names.values()) <= registry().keys()
    assert not names.keys() & registry().keys()


def hybrid(prefix):
    return initialized(gluon.nn.Dense(3, in_units=3, prefix=prefix), hybridize=True)


@pytest.mark.parametrize(
    "layers, warned",
    [
        (["head_*"], []),
        (["haed_*", "body_fwd"], ["unknown layer 'haed_*'; the closest is 'head_fwd'"]),
    ],
)
def test_layers_that_no_graph_has_are_told_once(layers, warned, caplog):
    amp.init(policy=amp.Policy.default("bfloat16").override(fp32_layers=layers))
    body, head = hybrid("body_"), hybrid("head_")
    head(body(X))
    caplog.clear()
    for _ in range(2):
        with autograd.record():
            head(body(X))
        head(body(X))
    assert len(caplog.records) == len(warned)
    assert all(text in caplog.text for text in warned)


def test_layers_that_no_bound_symbol_has_are_told(caplog):
    amp.init(policy=amp.Policy.default("bfloat16").override(fp32_layers=["fcc"]))
    SYMBOL.simple_bind(mx.cpu(), data=(2, 3), grad_req="null").forward()
    amp.shutdown()
    assert "unknown layer 'fcc'; the closest is 'fc'" in caplog.text


# ---------------------------------------------------------------------- what other libraries write

SPELLINGS = own_tables("spellings")
#: What has no attribute of that name, by the table of lists/spellings.toml.
OWNERS = {
    "module 'mxamp'": lambda: amp,
    "module 'mxamp.debugging'": lambda: amp.debugging,
    "'GradScaler' object": amp.GradScaler,
}
#: Arguments before the one that mxamp has not, by function.
BEFORE = {
    "decorate": lambda: ["sgd"],
    "initialize": lambda: [net()],
    "scale_loss": lambda: [X, trainer()],
    **{f"GradScaler.{name}": lambda: [amp.GradScaler()] for name in ("scale", "step", "unscale_")},
}
#: Values, not names of arguments.
VALUES = re.compile("cpu|cuda|gpu|mps|xpu|dynamic|(mixed_)?b?float16")


@pytest.mark.parametrize("table, name", [
    (table, name) for table in SPELLINGS for name in SPELLINGS[table]
])  # fmt: skip
def test_a_name_of_another_library_says_what_to_write(table, name):
    if table == "Policy" and sys.version_info < (3, 10):
        pytest.skip("the constructor of a dataclass does not say whose it is")
    with pytest.raises((amp.UnknownNameError, AttributeError)) as caught:
        if table in OWNERS:
            getattr(OWNERS[table](), name)
        elif VALUES.fullmatch(name):
            attrgetter(table)(amp)(name)
        else:
            attrgetter(table)(amp)(*BEFORE.get(table, list)(), **{name: 1})
    assert str(caught.value).endswith(SPELLINGS[table][name])


def test_advice_names_what_there_is():
    text = " ".join(advice for table in SPELLINGS.values() for advice in table.values())
    for owner, named in ((amp, r"\bamp\.(\w+)"), (amp.GradScaler, r"\bscaler\.(\w+)")):
        names = set(re.findall(named, text))
        assert len(names) > 5
        assert not [name for name in names if not hasattr(owner, name)]


def test_a_name_that_cannot_be_imported_says_what_to_write(monkeypatch):
    with pytest.raises(AttributeError, match="'GradScalar'; the closest is 'GradScaler'"):
        _ = amp.GradScalar
    with pytest.raises(ImportError, match="'GradScalar'; the closest is 'GradScaler'"):
        from mxamp import GradScalar  # noqa: F401
    monkeypatch.delattr(amp, "frontends")
    monkeypatch.delitem(sys.modules, "mxamp.frontends")
    from mxamp import frontends

    assert frontends is amp.frontends


def test_torchs_getters_and_setters():
    scaler = amp.GradScaler()
    for name, value in (("growth_factor", 4.0), ("backoff_factor", 0.25), ("growth_interval", 7)):
        getattr(scaler, f"set_{name}")(value)
        assert getattr(scaler, f"get_{name}")() == value
    with pytest.raises(amp.ArgumentError, match="growth_factor must be more than 1"):
        scaler.set_growth_factor(1)
    assert scaler.get_growth_factor() == 4
    with pytest.raises(amp.ArgumentError, match=r"scaler.step\(trainer, batch_size\)"):
        scaler.step(trainer())


def test_a_scaled_loss_without_with_says_what_to_write():
    amp.init("float16", ctx=mx.cpu())
    scaling = trainer()
    amp.init_trainer(scaling)
    with pytest.raises(AttributeError, match=r"write `with amp.scale_loss\(loss, trainer\)"):
        amp.scale_loss(X, scaling).backward()

"""One contender of `scripts/bench/models`: build a model, and do a step for each line of input.

models_worker.py CONTENDER MODEL MODE DTYPE DEVICE [FOLDER]

Contenders load the same parameters from FOLDER and save their outputs and gradients there. Without
a folder, as with `--memory`, only steps run.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np


def print_json(**values: Any) -> None:
    """Print keyword arguments as a line of JSON, for the parent process."""
    print(json.dumps(values), flush=True)


def peak_memory() -> Optional[int]:
    """Return the most bytes that this process has held in memory; None without Linux's /proc.

    `getrusage`'s maximum survives fork and exec, so a child would start with its parent's. VmHWM
    starts at zero with each program.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    lines = (line.split() for line in status.splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "VmHWM:"), None)


#: Layers and sequence length of encoders of BERT-base's size.
BERTS = {"bert": (2, 128), "bert_base": (12, 128), "bert_base_512": (12, 512)}
#: GluonCV's detector that the name ssd stands for.
SSD = "ssd_512_resnet50_v1_custom"
#: The file of parameters that float32 saves and the other contenders load.
PARAMETERS = "mxnet.params"
#: Steps and units of recurrent networks.
RECURRENT = {"lstm": (20, 256), "lstm_cell": (20, 256), "lstm_650": (35, 650)}


def parse_model(model: str) -> Tuple[str, int, int]:
    """Return the name, the batch size and the image size in "resnet50-16" or "vgg16-2@299"."""
    name, batch = model.rsplit("-", 1)
    rows, _, size = batch.partition("@")
    return name, int(rows), int(size or (512 if name == "ssd" else 224))


def batch_of(model: str) -> Tuple[List[Any], Any]:
    """Return the NumPy inputs and labels of a model, the same in every process."""
    random = np.random.RandomState(0)
    name, rows, size = parse_model(model)
    if name == "mlp":
        inputs = random.randn(rows, 4096)
    elif name in BERTS:
        inputs = random.randn(rows, BERTS[name][1], 768)
    elif name in RECURRENT:
        inputs = random.randn(rows, *RECURRENT[name])
    else:
        inputs = random.randn(rows, 3, size, size)
    return [inputs.astype("float32")], random.randint(0, 10, rows).astype("float32")


# ---------------------------------------------------------------------- MXNet


def mxnet_model(model: str) -> Any:
    """Return a model by its name, a Gluon block that is not initialized."""
    from mxnet.gluon import nn, rnn
    from mxnet.gluon.model_zoo import vision

    name = parse_model(model)[0]

    class Layer(nn.HybridBlock):
        """An encoder layer of BERT-base."""

        def __init__(self) -> None:
            super().__init__()
            with self.name_scope():
                self.qkv = nn.Dense(2304, flatten=False, in_units=768)
                self.out = nn.Dense(768, flatten=False, in_units=768)
                self.first = nn.Dense(3072, flatten=False, in_units=768)
                self.second = nn.Dense(768, flatten=False, in_units=3072)
                self.norms = nn.HybridSequential()
                self.norms.add(nn.LayerNorm(in_channels=768), nn.LayerNorm(in_channels=768))

        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
            def heads(t: Any) -> Any:
                t = F.transpose(F.reshape(t, shape=(0, 0, 12, 64)), axes=(0, 2, 1, 3))
                return F.reshape(t, shape=(-3, 0, 0))

            q, k, v = (heads(t) for t in F.split(self.qkv(x), num_outputs=3, axis=-1))
            scores = F.softmax(F.batch_dot(q, k, transpose_b=True) * 0.125)
            mixed = F.reshape(F.batch_dot(scores, v), shape=(-4, -1, 12, 0, 0))
            mixed = F.reshape(F.transpose(mixed, axes=(0, 2, 1, 3)), shape=(0, 0, -3))
            x = self.norms[0](x + self.out(mixed))
            return self.norms[1](x + self.second(F.LeakyReLU(self.first(x), act_type="gelu")))

    class Bert(nn.HybridBlock):
        def __init__(self) -> None:
            super().__init__()
            with self.name_scope():
                self.layers = nn.HybridSequential()
                self.layers.add(*[Layer() for _ in range(BERTS[name][0])])
                self.classifier = nn.Dense(10, in_units=768)

        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
            return self.classifier(F.mean(self.layers(x), axis=1))

    class Recurrent(nn.HybridBlock):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            self.fused = fused
            self.steps, units = RECURRENT[name]
            with self.name_scope():
                if fused:
                    self.rnn = rnn.LSTM(units, 2, layout="NTC", input_size=units)
                else:
                    self.rnn = rnn.LSTMCell(units, input_size=units)
                self.classifier = nn.Dense(10, in_units=units)

        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
            if self.fused:
                out = self.rnn(x)
            else:
                out, _ = self.rnn.unroll(self.steps, x, layout="NTC", merge_outputs=True)
            return self.classifier(F.mean(out, axis=1))

    class SqueezeExcite(nn.HybridBlock):
        """A residual block with squeeze and excitation, written with operators, as in textbooks."""

        def __init__(self, channels: int, strides: int) -> None:
            super().__init__()
            with self.name_scope():
                self.conv1 = nn.Conv2D(channels, 3, strides, 1, use_bias=False)
                self.norm1 = nn.BatchNorm()
                self.conv2 = nn.Conv2D(channels, 3, 1, 1, use_bias=False)
                self.norm2 = nn.BatchNorm()
                self.shortcut = nn.Conv2D(channels, 1, strides, use_bias=False)
                self.pool = nn.GlobalAvgPool2D()
                self.squeeze = nn.Dense(channels // 4)
                self.excite = nn.Dense(channels)

        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
            y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
            gates = F.sigmoid(self.excite(F.relu(self.squeeze(self.pool(y)))))
            y = F.broadcast_mul(y, F.reshape(gates, shape=(0, 0, 1, 1)))
            return F.relu(F.broadcast_add(y, self.shortcut(x)))

    if name == "textbook":
        net = nn.HybridSequential()
        net.add(nn.Conv2D(64, 7, 2, 3), nn.BatchNorm(), nn.MaxPool2D(3, 2, 1))
        for channels, strides in ((64, 1), (128, 2), (256, 2), (512, 2)):
            net.add(SqueezeExcite(channels, strides), SqueezeExcite(channels, 1))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
        return net
    if name == "mlp":
        net = nn.HybridSequential()
        for _ in range(3):
            net.add(nn.Dense(4096, activation="relu", in_units=4096))
        net.add(nn.Dense(10, in_units=4096))
        return net
    if name in BERTS:
        return Bert()
    if name in RECURRENT:
        return Recurrent(name != "lstm_cell")
    name = {"mobilenet_v2": "mobilenet_v2_1_0", "resnet50": "resnet50_v1"}.get(name, name)
    if hasattr(vision, name):
        return getattr(vision, name)(classes=10)
    from gluoncv import model_zoo

    options: Dict[str, Any] = {"classes": 10}
    if name == "ssd":
        name, options = SSD, {"classes": ["cat", "dog"], "pretrained_base": False}
    return model_zoo.get_model(name, **options)


def initialized_model(model: str) -> Tuple[Any, List[Any], Any]:
    """Return a Gluon block with the same random parameters in each process, inputs and labels."""
    import mxnet as mx

    mx.random.seed(0)
    inputs, labels = batch_of(model)
    net = mxnet_model(model)
    net.initialize()  # a detector's symbol has vectors, at which Xavier fails
    net.collect_params(".*weight").initialize(mx.init.Xavier(), force_reinit=True)
    return net, [mx.nd.array(array) for array in inputs], mx.nd.array(labels)


def sgd_trainer(net: Any) -> Any:
    """Return a Gluon trainer of all parameters: SGD with momentum, outside the kvstore."""
    from mxnet import gluon

    settings = {"learning_rate": 1e-6, "momentum": 0.9}
    return gluon.Trainer(net.collect_params(), "sgd", settings, update_on_kvstore=False)


def enable_amp(contender: str, dtype: str) -> Any:
    """Return a contender's AMP module; turn it on if the contender runs under it from the start."""
    if contender in ("mxamp", "converted", "fused", "tuned"):
        import mxamp as amp

        # isort: split
        import mxnet as mx

        if contender == "mxamp":
            amp.init(dtype, ctx=mx.current_context())
        return amp
    import mxamp.framework.compat

    mxamp.framework.compat.import_mxnet()
    from mxnet.contrib import amp

    if contender == "stock":
        amp.init(dtype)
    return amp


def tune(amp: Any, net: Any, data: Any, labels: Any, loss: Any, dtype: str) -> Any:
    """Return the net as `amp.tune` chooses to run it, and a description of the choice."""
    batch = (*data, labels) if loss is not None else tuple(data)
    tuning = amp.tune(net, batch, loss, target_dtype=dtype, budget="60s")
    policy, chosen = tuning.policy, tuning.in_mxnet  # OpenVINO is a contender of its own
    if chosen.way in ("converted", "fused"):
        options = tuning.convert_options
        net = amp.convert_hybrid_block(net, policy=policy, example_inputs=data, **options)
        net.hybridize(static_alloc=True, static_shape=True)
    if chosen.way == "autocast":
        amp.init(policy=policy)
    words = [chosen.way, chosen.precision] if chosen.way != "plain" else ["float32"]
    words += [f"{len(tuning.kept)} layers in float32"] if tuning.kept else []
    return net, {"chosen": ", ".join(words), "plain": chosen.way == "plain"}


def mxnet_step(
    contender: str, model: str, mode: str, dtype: str, folder: Optional[Path]
) -> Tuple[Callable[[], Any], Dict[str, Any]]:
    """Return a function that runs or trains a model once, and what `tune` has chosen."""
    amp = enable_amp(contender, dtype)
    import mxnet as mx
    from mxnet import autograd, gluon, nd

    net, data, labels = initialized_model(model)
    if folder is not None and contender == "float32":
        net(*data)
        net.save_parameters(str(folder / PARAMETERS))
    elif folder is not None:
        net.load_parameters(str(folder / PARAMETERS))
    net.hybridize(static_alloc=True, static_shape=True)
    choice: Dict[str, Any] = {}
    if contender == "tuned":
        loss = gluon.loss.SoftmaxCrossEntropyLoss() if mode == "training" else None
        net, choice = tune(amp, net, data, labels, loss, dtype)
    plain = contender == "float32" or bool(choice.get("plain"))
    params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    trainer = sgd_trainer(net)
    if contender in ("converted", "fused"):
        net = amp.convert_hybrid_block(
            net, dtype, cast_optional_params=True, example_inputs=data, fuse=contender == "fused"
        )
        net.hybridize(static_alloc=True, static_shape=True)
    elif not plain and not (contender == "tuned" and mode == "inference"):
        amp.init_trainer(trainer)

    def train() -> None:
        with autograd.record():
            losses = losses_of(net(*data), labels)
            if plain:
                autograd.backward(losses)
            else:
                with amp.scale_loss(losses, trainer) as scaled:
                    autograd.backward(scaled)
        trainer.step(len(labels))
        nd.waitall()

    def infer() -> Any:
        out = net(*data)
        out = out[1] if isinstance(out, (list, tuple)) else out  # a detector's scores
        out.wait_to_read()
        return out

    if folder is not None:
        np.save(folder / f"{contender}-outputs.npy", infer().astype("float32").asnumpy())
    if folder is not None and mode == "training":
        mx.random.seed(0)  # the same dropout, whether parameters were initialized or loaded
        train()
        factor = 1.0
        if contender == "stock":
            factor = trainer._amp_loss_scaler.loss_scale
        elif contender in ("mxamp", "tuned") and not plain:
            factor = trainer.amp_last_step.loss_scale
        grads = [p.grad().astype("float32").asnumpy().ravel() / factor for p in params]
        np.save(folder / f"{contender}-gradients.npy", np.concatenate(grads))
    return train if mode == "training" else infer, choice


def losses_of(outputs: Any, labels: Any) -> List[Any]:
    """Return the losses of a classifier, or made-up ones of a detector's scores and boxes."""
    from mxnet import gluon

    if isinstance(outputs, (list, tuple)):
        return [one.square().mean() for one in outputs[:2]]
    return [gluon.loss.SoftmaxCrossEntropyLoss()(outputs, labels)]


def passes_and_step(contender: str, model: str) -> Tuple[Callable[[], Any], Callable[[], Any], Any]:
    """Return how a contender trains on a GPU: forward and backward pass, step, and the trainer.

    "cast by hand" trains float16 parameters with float32 master weights, without a loss scale.
    """
    import mxnet as mx

    ctx, by_hand = mx.gpu(0), contender == "cast by hand"
    with ctx:
        amp = enable_amp("float32" if by_hand else contender, "float16")
    from mxnet import autograd

    net, (inputs, labels) = mxnet_model(model), batch_of(model)
    net.initialize(ctx=ctx)
    if by_hand:
        net.cast("float16")
    net.hybridize(static_alloc=True, static_shape=True)
    dtype, scales = "float16" if by_hand else "float32", contender in ("mxamp", "stock")
    data, label = [mx.nd.array(one, ctx, dtype) for one in inputs], mx.nd.array(labels, ctx)
    trainer = sgd_trainer(net)
    trainer._optimizer.multi_precision = by_hand
    if scales:
        amp.init_trainer(trainer)

    def passes() -> None:
        with autograd.record():
            out = net(*data)
            if by_hand and not isinstance(out, (list, tuple)):
                out = out.astype("float32")
            losses = losses_of(out, label)
            if scales:
                with amp.scale_loss(losses, trainer) as scaled:
                    autograd.backward(scaled)
            else:
                autograd.backward(losses)

    return passes, lambda: trainer.step(len(labels)), trainer


# ---------------------------------------------------------------------- PyTorch


def torch_step(model: str, mode: str, dtype: str, autocast: bool) -> Callable[[], Any]:
    """Return a function that runs or trains a model's PyTorch counterpart once."""
    import torch
    from torch import nn

    name = parse_model(model)[0]
    torch.manual_seed(0)

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True)
            count = BERTS[name][0]
            self.layers = nn.TransformerEncoder(layer, count, enable_nested_tensor=False)
            self.classifier = nn.Linear(768, 10)

        def forward(self, x: Any) -> Any:
            return self.classifier(self.layers(x).mean(1))

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(256, 256)

        def forward(self, x: Any) -> Any:
            out, state = [], None
            for step in x.unbind(1):
                state = self.cell(step, state)
                out.append(state[0])
            return torch.stack(out, 1), state

    class Recurrent(nn.Module):
        def __init__(self, rnn: Any) -> None:
            super().__init__()
            self.rnn = rnn
            self.classifier = nn.Linear(RECURRENT[name][1], 10)

        def forward(self, x: Any) -> Any:
            return self.classifier(self.rnn(x)[0].mean(1))

    layers = [m for _ in range(3) for m in (nn.Linear(4096, 4096), nn.ReLU())]
    made = {
        "mlp": lambda: nn.Sequential(*layers, nn.Linear(4096, 10)),
        **dict.fromkeys(BERTS, Bert),
        "lstm": lambda: Recurrent(nn.LSTM(256, 256, 2, batch_first=True)),
        "lstm_650": lambda: Recurrent(nn.LSTM(650, 650, 2, batch_first=True)),
        "lstm_cell": lambda: Recurrent(Unrolled()),
    }
    if name in made:
        net = made[name]()
    else:
        import torchvision

        name = name.replace("mobilenetv3", "mobilenet_v3")
        net = getattr(torchvision.models, name)(num_classes=10)
        net = net.to(memory_format=torch.channels_last)
    inputs, label = batch_of(model)
    data = [torch.from_numpy(a) for a in inputs]
    if data[0].ndim == len("NCHW"):
        data = [x.contiguous(memory_format=torch.channels_last) for x in data]
    net.train(mode == "training")
    labels = torch.from_numpy(label).long()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
    context = lambda: torch.autocast("cpu", dtype=getattr(torch, dtype), enabled=autocast)  # noqa: E731

    def train() -> None:
        optimizer.zero_grad()
        with context():
            loss = nn.functional.cross_entropy(net(*data), labels)
        loss.backward()
        optimizer.step()

    def infer() -> None:
        with torch.inference_mode(), context():
            net(*data)

    return train if mode == "training" else infer


def main() -> None:
    """Build the contender's step, run it once, then once for each line of standard input."""
    contender, model, mode, dtype, device, *folders = sys.argv[1:]
    folder = Path(folders[0]) if folders else None
    choice: Dict[str, Any] = {}
    if contender.startswith("torch"):
        step = torch_step(model, mode, dtype, contender == "torch")
    elif contender.startswith(("onnxruntime", "openvino")):
        from models_onnx import onnx_step

        assert folder is not None, "the exported model is read from there"
        step = onnx_step(contender, model, folder)
    else:
        from mxamp.framework.compat import import_mxnet

        with import_mxnet().Context(device):
            step, choice = mxnet_step(contender, model, mode, dtype, folder)
    step()
    print_json(**choice)
    for _ in sys.stdin:
        began = time.perf_counter()
        step()
        print_json(seconds=time.perf_counter() - began, memory=peak_memory())


if __name__ == "__main__":
    main()

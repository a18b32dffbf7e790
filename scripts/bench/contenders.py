"""The contenders of `scripts/bench/models`, and the worker process of each."""

import json
import platform
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence

import click

from mxamp.errors import unknown

FOLDER = Path(__file__).resolve().parent
WORKER, EXPORT = FOLDER / "models_worker.py", FOLDER / "models_onnx.py"


class Kind(NamedTuple):
    """A contender's title, its library if that is not MXNet, and its limits."""

    title: str
    library: str = ""
    inference_only: bool = False
    cpu_only: bool = False
    bfloat16_only: bool = False


CONTENDERS = {
    "float32": Kind("float32"),
    "stock": Kind("mxnet.contrib.amp"),
    "mxamp": Kind("mxamp"),
    "converted": Kind("mxamp, converted", inference_only=True),
    "fused": Kind("mxamp, fused", inference_only=True, cpu_only=True),
    "tuned": Kind("mxamp, tuned", cpu_only=True, bfloat16_only=True),
    "torch32": Kind("PyTorch float32", "torch", cpu_only=True),
    "torch": Kind("PyTorch autocast", "torch", cpu_only=True),
    "onnxruntime": Kind("ONNX Runtime float32", "onnxruntime", True, True),
    "openvino32": Kind("OpenVINO float32", "openvino", True, True),
    "openvino": Kind("OpenVINO bfloat16", "openvino", True, True, True),
}
#: The modules that each library needs. All but PyTorch run the model that MXNet exports.
LIBRARIES = {"torch": "torch, torchvision", "onnxruntime": "onnxruntime", "openvino": "openvino"}
MODELS = (
    "resnet50-16", "resnet50-4", "mobilenet_v2-8", "densenet121-4", "squeezenet1_1-8", "vgg16-2",
    "resnext50_32x4d-2", "se_resnet50_v1-4", "mobilenetv3_large-8", "ssd-1", "textbook-4", "mlp-64",
    "bert-16", "bert-4", "bert_base-4", "bert_base_512-1", "lstm-8", "lstm_cell-8", "lstm_650-20",
)  # fmt: skip


class Setup(NamedTuple):
    """The settings that all contenders share."""

    dtype: str
    tuned: bool
    only: Sequence[str]  #: names of contenders; empty for all
    pythons: Dict[str, str]  #: for each of `LIBRARIES` that is installed, a Python that has it
    device: str = "cpu"


def runs_exported_model(name: str) -> bool:
    """Return whether a contender runs the model as ONNX."""
    return CONTENDERS[name].library in ("onnxruntime", "openvino")


class Worker:
    """A process that answers each line of input with a line of JSON.

    `description` is its first answer; `failure` is the error with which it has died.
    """

    def __init__(self, command: Sequence[str], env: Optional[Mapping[str, str]] = None) -> None:
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.log, text=True, env=env
        )
        self.failure: Optional[str] = None
        self.description = self._read()

    def _read(self) -> Dict[str, Any]:
        """Return the process's next answer; if it has died, set `failure` and return {}."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        if line:
            return dict(json.loads(line))
        self.process.wait()
        self.log.seek(0)
        errors = [text.strip() for text in self.log if "Error" in text] or ["the process died"]
        self.failure = errors[-1].replace("RuntimeError: ", "")[:100]
        return {}

    def ask(self, line: str) -> Dict[str, Any]:
        """Return the answer to a line; {} if the process has died."""
        if self.failure is not None or self.process.stdin is None:
            return {}
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            if pipe is not None:
                pipe.close()


class Contender(Worker):
    """A worker that holds one model and does a step on demand."""

    def __init__(
        self, name: str, model: str, mode: str, setup: Setup, python: str, folder: Optional[Path]
    ) -> None:
        self.name = name
        if folder is not None and runs_exported_model(name) and not any(folder.glob("model.onnx*")):
            # The contender's own Python may lack MXNet, which exports.
            export = [sys.executable, "-W", "ignore", str(EXPORT), model, str(folder)]
            subprocess.run(export, capture_output=True, check=False)
        command = [python, "-W", "ignore", str(WORKER), name, model, mode, setup.dtype]
        command += [setup.device, *([str(folder)] if folder is not None else [])]
        super().__init__(command)

    def run_step(self) -> Dict[str, Any]:
        """Return the seconds of one step and the peak memory; {} if the worker has died."""
        return self.ask("go")


def parse_only(text: Optional[str]) -> Sequence[str]:
    """Return the contenders in the text of `--only`, and float32, the baseline of all ratios."""
    if text is None:
        return ()
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in CONTENDERS:
            raise click.BadParameter(str(unknown("contender", name, CONTENDERS)))
    return [name for name in CONTENDERS if name in names or name == "float32"]


def check_models(_context: Any, _option: Any, names: Sequence[str]) -> Sequence[str]:
    """Return the names of models; raise if neither MODELS nor GluonCV has one."""
    own = sorted({model.rsplit("-", 1)[0] for model in MODELS})
    for name in names:
        if re.fullmatch(r"[\w.]+-[1-9]\d*(@[1-9]\d*)?", name) is None:
            raise click.BadParameter(f"{name!r} has no batch: write it as in resnet50-16")
        title = name.rsplit("-", 1)[0]
        if title in own:
            continue
        from gluoncv import model_zoo

        known = (*own, *model_zoo.get_model_list())
        if title.lower() not in known:
            raise click.BadParameter(str(unknown("model", title, known)))
    return names


def find_pythons(options: Mapping[str, Optional[Path]], only: Sequence[str]) -> Dict[str, str]:
    """Return a Python for each installed library of `LIBRARIES`.

    `options` holds the paths of `--torch-python` and its like, by library. Raises if such a Python,
    or the one that a contender of `only` needs, lacks the library.
    """
    has_onnx = _imports(sys.executable, "onnx, onnxruntime")
    found = {}
    for library, modules in LIBRARIES.items():
        python = str(options.get(library) or sys.executable)
        needed = options.get(library) or any(CONTENDERS[name].library == library for name in only)
        if not _imports(python, modules):
            if needed:
                option = f"--{library}-python"
                raise click.ClickException(f"{python} has no {modules}: give {option} one that has")
        elif library == "torch" or has_onnx:
            found[library] = python
        elif needed:
            python = sys.executable
            raise click.ClickException(f"{library} needs mxamp[onnx] in {python}, for the export")
    return found


def _imports(python: str, modules: str) -> bool:
    """Return whether a Python imports modules, such as "torch, torchvision"."""
    done = subprocess.run([python, "-c", f"import {modules}"], capture_output=True, check=False)
    return done.returncode == 0


def runnable_contenders(mode: str, setup: Setup) -> Dict[str, str]:
    """Return the contenders that run in a mode under these settings, and the Python of each."""
    found = {}
    for name in setup.only or CONTENDERS:
        kind = CONTENDERS[name]
        if not (
            (kind.library and kind.library not in setup.pythons)
            or (kind.inference_only and mode != "inference")
            or (kind.cpu_only and setup.device != "cpu")
            or (kind.bfloat16_only and setup.dtype != "bfloat16")
            or (name == "fused" and setup.dtype == "float16")
            or (name == "tuned" and not setup.tuned)
        ):
            found[name] = setup.pythons.get(kind.library, sys.executable)
    return found


def library_versions(pythons: Dict[str, str]) -> Dict[str, str]:
    """Return the versions of Python, MXNet, mxamp and each library that has a Python."""
    import mxnet

    import mxamp

    found = {"Python": platform.python_version(), "MXNet": mxnet.__version__}
    found["mxamp"] = mxamp.__version__
    titles = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
    for library, python in pythons.items():
        program = [python, "-c", f"import {library}; print({library}.__version__)"]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        found[titles[library]] = re.split("[-+]", done.stdout.strip())[0]
    return found

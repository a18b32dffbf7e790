"""The contenders of `scripts/bench/models`: who can run here, and the process that each is."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, NamedTuple, Optional, Sequence

import click

from mxamp.errors import unknown

FOLDER = Path(__file__).resolve().parent
WORKER, EXPORT = FOLDER / "models_worker.py", FOLDER / "models_onnx.py"
CONTENDERS = (
    "float32", "substituted", "stock", "mxamp", "converted", "fused", "tuned", "torch32", "torch",
    "onnxruntime", "openvino32", "openvino",
)  # fmt: skip
TITLES = {
    "substituted": "float32, substituted", "stock": "mxnet.contrib.amp",
    "converted": "mxamp, converted", "fused": "mxamp, fused", "tuned": "mxamp, tuned",
    "torch32": "PyTorch float32", "torch": "PyTorch autocast",
    "onnxruntime": "ONNX Runtime float32", "openvino32": "OpenVINO float32",
    "openvino": "OpenVINO bfloat16",
}  # fmt: skip
#: In the order of their options: the contenders of other libraries, and what they import.
OTHERS = {
    "torch": (("torch32", "torch"), "torch, torchvision"),
    "onnxruntime": (("onnxruntime",), "onnxruntime"),
    "openvino": (("openvino32", "openvino"), "openvino"),
}
#: These run the model that MXNet exports.
ONNX = (*OTHERS["onnxruntime"][0], *OTHERS["openvino"][0])
ONLY_INFERENCE = ("converted", "fused", *ONNX)
ONLY_CPU = ("substituted", "fused", "tuned", *ONNX, *OTHERS["torch"][0])
ONLY_BFLOAT16 = ("substituted", "fused", "tuned", "openvino")


class Setup(NamedTuple):
    """What all contenders have in common."""

    dtype: str
    tuned: bool
    only: Sequence[str]  #: names of contenders; all where it is empty
    pythons: Dict[str, str]  #: of `OTHERS`: a Python that has the library
    device: str = "cpu"


def why(log: Iterable[str]) -> str:
    """Return why a worker has failed, by the lines of its standard error."""
    lines = [text.strip() for text in log if "Error" in text] or ["the process died"]
    return lines[-1].replace("RuntimeError: ", "")[:100]


class Contender:
    """A process that holds one model, and takes turns."""

    def __init__(
        self,
        name: str,
        model: str,
        mode: str,
        dtype: str,
        folder: Path,
        python: str,
        device: str = "cpu",
    ) -> None:
        self.name = name
        if name in ONNX and not list(folder.glob("model.onnx*")):
            # Not in a contender's own process, whose Python needs no MXNet.
            export = [sys.executable, "-W", "ignore", str(EXPORT), model, str(folder)]
            subprocess.run(export, capture_output=True, check=False)
        command = [
            python,
            "-W",
            "ignore",
            str(WORKER),
            name,
            model,
            mode,
            dtype,
            device,
            str(folder),
        ]
        self.log = open(folder / f"{name}.log", "w+", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.failure: Optional[str] = None
        self.said = self.answer()

    def answer(self) -> Dict[str, Any]:
        """Return what the process says next; nothing where it has failed."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        if line:
            return dict(json.loads(line))
        self.process.wait()
        self.log.seek(0)
        self.failure = why(self.log)
        return {}

    def turn(self) -> Optional[float]:
        """Return the seconds of one step, None where it has failed."""
        if self.failure is None and self.process.stdin:
            try:
                self.process.stdin.write("go\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                pass
            return self.answer().get("seconds")
        return None

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.log.close()


def chosen(text: Optional[str]) -> Sequence[str]:
    """Return the names that `--only` gives, float32 with them: all others are compared with it."""
    if text is None:
        return ()
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in CONTENDERS:
            raise click.BadParameter(str(unknown("contender", name, CONTENDERS)))
    return [name for name in CONTENDERS if name in names or name == "float32"]


def pythons_of(given: Dict[str, Optional[str]], only: Sequence[str]) -> Dict[str, str]:
    """Return the Pythons that have PyTorch and others, by `OTHERS`; they are asked.

    Raises where one that was given, or that a contender of `only` needs, has not.
    """
    has_onnx = not _fails([sys.executable, "-c", "import onnx"])
    found = {}
    for library, (names, modules) in OTHERS.items():
        python = given[library] or sys.executable
        asked = given[library] is not None or bool(set(names) & set(only))
        fits = has_onnx or not set(names) & set(ONNX)
        if _fails([python, "-c", f"import {modules}"]):
            if asked:
                option = f"--{library}-python"
                raise click.ClickException(f"{python} has no {modules}: give {option} one that has")
        elif fits:
            found[library] = python
        elif asked:
            python = sys.executable
            raise click.ClickException(f"{library} needs onnx here: {python} -m pip install onnx")
    return found


def _fails(command: Sequence[str]) -> bool:
    return bool(subprocess.run(command, capture_output=True, check=False).returncode)


def contenders_of(mode: str, setup: Setup) -> Dict[str, str]:
    """Return who can run here, and the Python of each."""
    pythons = {
        name: setup.pythons[library]
        for library, (names, _) in OTHERS.items()
        if library in setup.pythons
        for name in names
    }
    others = {name for names, _ in OTHERS.values() for name in names}
    found = {}
    for name in setup.only or CONTENDERS:
        if name in others and name not in pythons:
            continue
        if name in ONLY_INFERENCE and mode != "inference":
            continue
        if name == "tuned" and not setup.tuned:
            continue
        if name in ONLY_CPU and setup.device != "cpu":
            continue
        if name in ONLY_BFLOAT16 and setup.dtype != "bfloat16":
            continue
        found[name] = pythons.get(name, sys.executable)
    return found


def versions(pythons: Dict[str, str]) -> Dict[str, str]:
    """Return the versions of what is compared."""
    import mxnet

    import mxamp

    found = {"Python": platform.python_version(), "MXNet": mxnet.__version__}
    found["mxamp"] = mxamp.__version__
    titles = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
    for library, python in pythons.items():
        ask = [python, "-c", f"import {library}; print({library}.__version__)"]
        done = subprocess.run(ask, capture_output=True, text=True, check=False)
        found[titles[library]] = re.split("[-+]", done.stdout.strip())[0]
    return found

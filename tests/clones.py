"""A clone as far as its scripts go, with a Python made of bash."""

import os
import shutil
import subprocess

from helpers import ROOT

BASH = shutil.which("bash")
# Answers what setup.sh asks, makes environments that hold itself, and does as $PIP_DOES for pip.
FAKE = """#!{bash}
case "$1 ${{2:-}}" in
    "-c "*version_info*) echo {version} ;;
    "-c "*) echo '{path}' ;;
    "-W ignore") [ -e "$CALLS.horovod" ] ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && eval "${{VENV_DOES:-}}" ;;
    "-m pip") case "$3" in
        config) echo ":env:.no-index='${{PIP_NO_INDEX:-}}'" ;;
        install) echo "$PWD: ${{PIP_INDEX_URL:-}} $*" >>"$CALLS"; eval "${{PIP_DOES:-}}" ;;
    esac ;;
    */"cuda_stubs "*) mkdir -p "$2" && echo built >>"$CALLS.built" && echo "SIMULATED=a b" ;;
    *) echo "ran $*${{SIMULATED:+ with $SIMULATED}}" ;;
esac
"""


class Clone:
    """A clone as far as its scripts go, in a folder with an awkward name."""

    def __init__(self, folder):
        self.bin = folder / "bin"
        self.path = folder / "with space" / 'it\'s "mxamp"'
        shutil.copytree(ROOT / "scripts", self.path / "scripts")
        for name in ("setup.cfg", "setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, self.path / name)
        self.bin.mkdir()
        self.calls = folder / "calls"

    def python(self, version="3.11"):
        path = self.bin / f"python{version}"
        path.write_text(FAKE.format(bash=BASH, version=version, path=path))
        path.chmod(0o755)
        return str(path)

    def start(self, *arguments, name="test", **env):
        return subprocess.Popen(
            [BASH, str(self.path / "scripts" / name), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "CALLS": str(self.calls), **env},
        )  # fmt: skip

    def run(self, *arguments, **options):
        process = self.start(*arguments, **options)
        process.said, process.error = process.communicate(timeout=60)
        return process

    def set_up(self, version="3.11", **options):
        return self.run("--setup-only", "--python", self.python(version), **options)

    def installs(self):
        """What pip was asked for."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []

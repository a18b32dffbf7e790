"""What wheels hold: the start-up hook stands where every Python reads it."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from helpers import ROOT

BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]
for build in (build_meta.build_wheel, build_meta.build_editable):
    print("built", build(folder))
"""


@pytest.mark.slow
def test_the_start_up_hook_is_in_the_root_of_wheels(tmp_path):
    pytest.importorskip("setuptools", minversion="64")
    pytest.importorskip("wheel")
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "mxamp", source / "mxamp", ignore=shutil.ignore_patterns("*.pyc", "*.egg-info")
    )
    shutil.copytree(ROOT / "lists", source / "lists")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, str(tmp_path)],
        cwd=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    built = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("built")]
    assert len(built) == 2, done.stderr[-2000:]
    for name in built:
        assert "-py3-none-any" in name
        with zipfile.ZipFile(tmp_path / name) as wheel:
            names = wheel.namelist()
            assert "mxamp_startup.pth" in names
            assert not [n for n in names if ".data/" in n]
            assert b"mxamp_startup.pth" in wheel.read(
                next(n for n in names if n.endswith("RECORD"))
            )

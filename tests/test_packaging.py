"""What is in the source distribution and in the wheel, and what their metadata say."""

import configparser
import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from types import SimpleNamespace

import pytest

import mxamp as amp
from helpers import ROOT
from mxamp.framework.compat import MXNET

PARTS = (
    ".ci", ".github", ".gitignore", ".pre-commit-config.yaml", ".stubs", "CHANGELOG.md", "CITATION.cff",
    "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "docs", "examples", "lists", "mkdocs.yml",
    "mxamp", "noxfile.py", "pyproject.toml", "scripts", "setup.cfg", "setup.py", "tests",
)  # fmt: skip
INSTALL = (ROOT / "README.md").read_text().split("## Install")[1].split("\n## ")[0]
COMMANDS = re.findall(r"^    (pip install .*?) *(?:#.*)?$", INSTALL, re.M)
LEFT_BEHIND = ("mxamp/policy/__pycache__/gone.pyc", "build/lib/mxamp/gone.py")


def files_below(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Both distributions, built from a copy in which older builds and runs have left files."""
    pytest.importorskip("setuptools")
    out = tmp_path_factory.mktemp("dist")
    project = out / "project"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, project / part, ignore=ignored)
        else:
            shutil.copy(ROOT / part, project / part)
    files = files_below(project)
    for name in LEFT_BEHIND:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "sdist", "-d", str(out), "bdist_wheel", "-d", str(out)],
        cwd=project, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    metadata = next(name for name in names if name.endswith("/METADATA"))
    with tarfile.open(sdist) as tar:
        in_sdist = {m.name.split("/", 1)[1] for m in tar.getmembers() if m.isfile()}
    return SimpleNamespace(
        project=project, files=files, in_sdist=in_sdist, wheel=wheel, in_wheel=names,
        metadata=email.message_from_bytes(archive.read(metadata)),
    )  # fmt: skip


@pytest.mark.slow
def test_the_source_distribution_is_the_project(built):
    extra = {name for name in built.in_sdist - built.files if ".egg-info/" not in name}
    assert built.files - built.in_sdist == set()
    assert extra == {"PKG-INFO"}


@pytest.mark.slow
def test_the_wheel_is_the_package(built):
    wanted = {name for name in built.files if re.fullmatch(r"mxamp/(?!startup/).*\.pyi?", name)}
    wanted |= {f"mxamp/{name}" for name in built.files if re.fullmatch(r"lists/.*(toml|py)", name)}
    wanted |= {"mxamp/py.typed", "mxamp_startup.py"}
    found = {name for name in built.in_wheel if not re.search(r"\.dist-info/|\.pth$", name)}
    assert found == wanted


@pytest.mark.slow
def test_the_description_has_no_links_to_files(built):
    """A package index shows the description without the project's files."""
    assert built.metadata["Description-Content-Type"] == "text/markdown"
    text = built.metadata.get_payload()
    assert text.startswith("# mxamp")
    assert not re.search(r"\]\((?!https?:)", text)
    assert "docs/speed.svg" not in text
    assert "GPUs (docs/gpus.md)" in text
    assert "contributing (CONTRIBUTING.md)" in text
    for name in re.findall(r"\(((?:docs|examples)[^)#]*)", text):
        assert any(file.startswith(name) for file in built.in_sdist), name


def test_the_citation_names_the_newest_version_of_the_changelog():
    changelog, citation = (ROOT / name for name in ("CHANGELOG.md", "CITATION.cff"))
    newest = re.search(r"^## \[(.+?)\] - (.+)$", changelog.read_text(), re.M).groups()
    cited = dict(re.findall(r"^([\w-]+): (.+)$", citation.read_text(), re.M))
    assert (cited["version"], cited["date-released"]) == newest
    assert (cited["version"], cited["title"]) == (amp.__version__, "mxamp")


def test_the_readme_s_install_section():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    assert [shlex.split(command)[-1] for command in COMMANDS] == [
        ".[cpu]", ".[cu112]", ".", f"mxamp-{amp.__version__}-py3-none-any.whl[cpu]"
    ]  # fmt: skip
    for extra, distribution in re.findall(r"\[(\w+)\]\".*# with (\S+)", INSTALL):
        assert distribution.endswith(f"=={MXNET}")
        assert distribution in extras[extra].split()
    bounds = config["options"]["python_requires"]
    assert bounds == ">=3.8,<3.14"
    assert "Python 3.8 to 3.13" in INSTALL


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if "cu112" not in command])
def test_the_readme_s_commands_install_mxamp_beside_mxnet(command, built):
    """Here MXNet and everything else are installed: pip has mxamp alone to install, without an index."""
    if sys.version_info >= (3, 13) and "[cpu]" in command:
        pytest.skip("pip refuses MXNet's metadata")
    installed = {distribution.metadata["Name"] for distribution in distributions()}
    if "[cpu]" in command and "mxnet" not in installed:
        pytest.skip("another wheel of MXNet is installed, and this one would have to be fetched")
    _, *arguments = shlex.split(command)
    if ".whl" in arguments[-1]:
        assert arguments[-1].split("[")[0] == built.wheel.name
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--dry-run", "--no-index", "--no-build-isolation"],
        cwd=built.wheel.parent if ".whl" in arguments[-1] else built.project,
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"Would install mxamp-{amp.__version__}"

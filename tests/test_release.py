"""scripts/release: what it refuses, and that it publishes only what has passed every step."""

import importlib.util
import sys
from pathlib import Path

import pytest

import mxamp as amp
from helpers import ROOT

CHANGES = "# Changelog\n\n## [1.2.3] - 2026-01-31\n"


@pytest.fixture
def release(monkeypatch):
    """The steps as a module, with steps that are not run."""
    spec = importlib.util.spec_from_file_location(
        "release_steps", ROOT / "scripts" / "release_steps.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "release_steps", module)
    spec.loader.exec_module(module)
    module.ran = []

    def step(name):
        def passes(*arguments):
            module.ran.append(name)
            return f"{name} is well"

        return passes

    for name in (
        "state", "build", "metadata", "install", "extras", "docs", "coverage", "publish"
    ):  # fmt: skip
        module.__dict__[f"real_{name}"] = module.__dict__[name]
        monkeypatch.setattr(module, name, step(name))
    return module


def fails(module, name, monkeypatch):
    def failing(*arguments):
        module.ran.append(name)
        raise module.StepError(f"{name} has failed")

    monkeypatch.setattr(module, name, failing)


def here(*arguments):
    return [*arguments, "--pythons", sys.executable]


def test_a_dry_run_does_everything_but_publish(release, capsys):
    assert release.main(here("--dry-run")) == 0
    extras = ["extras"] * len(release._extras())
    assert len(extras) > 5
    assert release.ran == [
        "state", "build", "metadata", "install", "install", *extras, "docs", "coverage"
    ]  # fmt: skip
    table = capsys.readouterr().out
    assert "install is well" in table and "extras: cu112" in table and "FAILED" not in table


def test_what_has_passed_is_published_where_it_was_told_to(release, capsys):
    assert release.main(here("--repository", "somewhere")) == 0
    assert release.ran[-1] == "publish"


@pytest.mark.parametrize("name", ["state", "build", "install", "extras", "docs", "coverage"])
def test_nothing_is_published_after_a_failure(name, release, monkeypatch, capsys):
    fails(release, name, monkeypatch)
    assert release.main(here("--repository", "somewhere")) == 1
    assert "publish" not in release.ran
    assert (release.ran[-1] == name) == (name in ("state", "build", "coverage"))
    assert f"{name} has failed" in capsys.readouterr().out


def test_an_error_of_a_step_is_a_line_of_the_table(release, monkeypatch, capsys):
    monkeypatch.setattr(release, "docs", lambda options: {}["gone"])
    assert release.main(here("--dry-run")) == 1
    said = capsys.readouterr().out
    assert said.count("KeyError: 'gone'") == 2, "as the step ends, and in the table"
    assert "    passed: " in said and "    FAILED: KeyError" in said
    assert release.ran[-1] == "coverage"


def test_some_steps_alone_publish_nothing(release, capsys):
    assert release.main(here("--repository", "somewhere", "--only", "metadata,docs")) == 0
    assert release.ran == ["metadata", "docs"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--dry-run", "--only", "test"], "unknown step 'test' in --only; there are state, build"),
        (["--dry-run", "--repository", "a"], "give one of them"),
    ],
)
def test_arguments_that_can_not_be_meant(arguments, words, release, capsys):
    with pytest.raises(SystemExit) as error:
        release.main(arguments)
    assert error.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("python", ["no-such-python", "false"])
def test_a_python_that_is_none(python, release, capsys):
    assert release.main(["--dry-run", "--pythons", python]) == 2
    assert f"{python!r} is no Python 3.8 to 3.13" in capsys.readouterr().err


def test_the_version_is_the_package_s(release):
    assert release.version() == amp.__version__


@pytest.fixture
def project(release, monkeypatch, tmp_path):
    """A project of version 1.2.3 whose git says what the test wants."""
    (tmp_path / "mxamp").mkdir()
    (tmp_path / "mxamp" / "_version.py").write_text('"""It."""\n__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    said = {"status": "", "tag": "v1.2.3\n"}
    monkeypatch.setattr(release, "run", lambda tool, command, *rest: said[command])
    return said


def options(release, **changes):
    given = release.Options(False, "somewhere", [], [], Path("unused"))
    return given._replace(**changes)


def test_a_clean_tree_with_its_tag_may_be_published(release, project):
    assert release.real_state(options(release)) == "1.2.3"


@pytest.mark.parametrize(
    "what, said, words",
    [
        ("status", " M setup.cfg\n", "a clean tree"),
        ("tag", "v1.2.2\nv1.2.30\n", "the tag v1.2.3 on this commit"),
    ],
)
def test_what_a_release_needs(what, said, words, release, project):
    project[what] = said
    with pytest.raises(release.StepError, match=f"there must be {words}"):
        release.real_state(options(release))
    assert words in release.real_state(options(release, dry_run=True))


@pytest.mark.parametrize("head", ["## [Unreleased]", "## [1.2.4] - 2026-01-31", "## [1.2.3]"])
def test_the_changelog_begins_with_the_version_and_its_day(head, release, project):
    (release.ROOT / "CHANGELOG.md").write_text(f"# Changelog\n\n{head}\n")
    with pytest.raises(release.StepError, match="CHANGELOG.md must begin with"):
        release.real_state(options(release, dry_run=True))


@pytest.mark.parametrize(
    "number, extras, wanted",
    [
        ("3.11", ["test"], ["mxamp.whl[cpu,test]"]),
        ("3.8", [], ["mxamp.whl[cpu]"]),
        ("3.13", ["test"], ["mxnet", "graphviz", "mxamp.whl[test]"]),
        ("3.13", [], ["mxnet", "graphviz", "mxamp.whl"]),
    ],
)
def test_mxnet_comes_with_the_package_where_pip_takes_it(
    number, extras, wanted, release, monkeypatch
):
    asked = []
    monkeypatch.setattr(release, "run", lambda *command: asked.append(str(command[-1])))
    monkeypatch.setattr(release, "_version_of", lambda python: number)
    release._pip_install(Path("python"), Path("mxamp.whl"), extras)
    assert asked == ["wheel", *wanted]


def test_commands_that_fail_say_their_last_line(release, tmp_path, capfd):
    with pytest.raises(release.StepError, match="ended with 3: the reason"):
        release.run(
            sys.executable, "-c", "print('much\\nthe reason'); raise SystemExit(3)", cwd=tmp_path
        )
    assert "much" in capfd.readouterr().err


def test_versions_of_large_extras_are_looked_up(release, monkeypatch):
    listed = "mxnet-cu112 (1.9.1)\nAvailable versions: 1.9.1, 1.9.0, 1.8.0.post0\n"
    monkeypatch.setattr(release, "run", lambda *command, **options: listed)
    found = release.real_extras("cu112", ["mxnet-cu112==1.9.1", "b==1.9.0"], None)
    assert found == "all 2 versions are there"
    for lacking in ("b==1.7", "b>=2"):
        with pytest.raises(release.StepError, match=f"there is no {lacking}"):
            release.real_extras("cu112", [lacking], None)
    assert all(release._extras()[name] for name in release.LARGE)

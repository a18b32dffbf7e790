"""`scripts/fuzz`: it finds planted defects and shrinks them; what it has found stays right."""

import subprocess
import sys

import pytest

from helpers import ROOT

PROGRAMS = sorted((ROOT / "tests" / "fuzzed").glob("*.json"))

sys.path.append(str(ROOT / "scripts"))
from fuzzing.generating import random_program  # noqa: E402
from fuzzing.hunting import Harvest, Runner, explained, hunt  # noqa: E402
from fuzzing.programs import Program, shrunk  # noqa: E402


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "scripts"))
    runners = []

    def make(planted=""):
        runners.append(Runner(planted))
        return runners[-1]

    yield make
    for one in runners:
        one.close()


@pytest.fixture(scope="module")
def shared():
    one = Runner()
    yield one
    one.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=[path.stem for path in PROGRAMS])
def test_what_was_found_is_right(path, shared):
    kind, text = shared.run(Program.from_json(path.read_text()))
    assert kind in ("equal", "imprecise"), text


@pytest.mark.slow
def test_random_programs(runner):
    """As `scripts/fuzz --programs 400 --seed 0`."""
    harvest = Harvest()
    hunt(runner(), iter(range(400)), harvest, explained())
    assert not harvest.findings, [one.program.to_json() for one in harvest.findings]
    assert harvest.counts["equal"] > 300


@pytest.mark.slow
@pytest.mark.parametrize("name, other, op", [("relu", "sigmoid", "relu"), ("mean", "sum", "mean")])
def test_a_planted_defect_is_found_and_shrunk(runner, name, other, op):
    harvest, planted, sound = Harvest(), runner(f"{name}={other}"), runner()
    for number in range(2000):
        program = random_program(number)
        if op not in program.features or program.special:
            continue
        hunt(planted, iter([number]), harvest, explained())
        if harvest.findings:
            break
    (finding,) = harvest.findings
    assert len(finding.program.nodes) <= 2
    assert any(feature.endswith(op) for feature in finding.features)
    assert len(finding.program.steps) <= 3
    assert sound.run(finding.program)[0] == "equal"


def test_programs_depend_on_their_number_alone():
    for number in range(30):
        text = random_program(number).to_json()
        assert text == random_program(number).to_json()
        assert Program.from_json(text).to_json() == text


def test_shrinking_keeps_what_matters():
    programs = (random_program(number) for number in range(1000))
    program = next(one for one in programs if "softmax" in one.features and len(one.nodes) > 4)
    small = shrunk(program, lambda one: "softmax" in one.features, trials=300)
    assert [node.op for node in small.nodes] == ["softmax"]
    assert len(small.steps) <= 2


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(runner):
    one = runner()
    program = Program.from_json(PROGRAMS[0].read_text())
    expected = one.run(program)
    one._process.kill()
    one._process.join()
    assert one._run_once(program)[0] in ("died", "invalid")
    assert one.run(program) == expected


@pytest.mark.slow
def test_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "fuzz"), "--programs", "20", "--workers", "1",
         "--out", str(tmp_path)], capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert " programs" in done.stdout, done.stdout + done.stderr
    assert done.returncode == (1 if list(tmp_path.iterdir()) else 0)

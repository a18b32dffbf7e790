"""`scripts/fuzz`: what it has found stays right, and it finds nothing new."""

import sys

import pytest

from helpers import ROOT

PROGRAMS = sorted((ROOT / "tests" / "fuzzed").glob("*.json"))

sys.path.append(str(ROOT / "scripts"))
from fuzzing.hunting import Harvest, Runner, explained, hunt  # noqa: E402
from fuzzing.programs import Program  # noqa: E402


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
def test_random_programs(shared):
    """As `scripts/fuzz --programs 400 --seed 0`."""
    harvest = Harvest()
    hunt(shared, iter(range(400)), harvest, explained())
    assert not harvest.findings, [one.program.to_json() for one in harvest.findings]
    assert harvest.counts["equal"] > 300

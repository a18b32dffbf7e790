"""Run the suite on every Python found, as a CPU without avx512 would, and for its coverage.

`nox` runs all but the GPUs and the coverage; `nox -s coverage` runs one session, `nox -l` lists
all. docs/evidence.md#versions says what was run.
"""

import os

import nox

nox.options.sessions = ["tests", "avx2", "smoke"]
nox.options.error_on_missing_interpreters = False
# Each Python's own: virtualenv makes none for 3.8 any more.
nox.options.default_venv_backend = "venv"

# As scripts/test has it.
PARALLEL = ["-n", str(min(os.cpu_count() or 1, 4)), "--dist", "worksteal"]
PYTHONS = ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"]
#: Python and NumPy, as docs/evidence.md#versions has them.
PAIRS = [
    ("3.8", "1.17.5"), ("3.8", "1.23.5"), ("3.9", "1.24.4"), ("3.11", "1.26.4"),
    ("3.12", "1.26.4"), ("3.13", "2.1.3"), ("3.13", "2.5.0"),
]  # fmt: skip


def install(session: nox.Session) -> None:
    """Install mxamp as the scripts do."""
    extras = "cpu,test"
    if session.python == "3.13":
        # MXNet asks for NumPy below 2, which 3.13 lacks, and runs on 2.1.
        session.install("--no-deps", "mxnet", "-c", "scripts/constraints.txt")
        session.install("requests", "graphviz", "-c", "scripts/constraints.txt")
        extras = "test"
    session.install("-e", f".[{extras}]", "-c", "scripts/constraints.txt")
    session.install("--no-deps", "gluoncv", "-c", "scripts/constraints.txt")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the suite on one Python."""
    install(session)
    session.run("pytest", *PARALLEL, *session.posargs)


@nox.session(python="3.11")
def avx2(session: nox.Session) -> None:
    """Run the suite with oneDNN held to AVX2: bfloat16 in float32 on rounded values."""
    install(session)
    session.run("pytest", *PARALLEL, *session.posargs, env={"DNNL_MAX_CPU_ISA": "AVX2"})


@nox.session(python="3.12")
def coverage(session: nox.Session) -> None:
    """Run the suite, and fail if it leaves more than 5 % of the package's lines unread."""
    install(session)
    session.install("coverage", "-c", "scripts/constraints.txt")
    session.run("coverage", "erase")
    # The tracer of older Pythons loses lines where tests trace or interrupt programs themselves.
    core = {"COVERAGE_CORE": "sysmon"}
    session.run("coverage", "run", "-m", "pytest", *PARALLEL, *session.posargs, env=core)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session
@nox.parametrize("python, numpy", [nox.param(*pair, id="-".join(pair)) for pair in PAIRS])
def smoke(session: nox.Session, numpy: str) -> None:
    """Train, convert and load a small network with mxamp's wheel, away from its source."""
    session.install("--no-deps", "mxnet==1.9.1", ".")
    needs = ["requests", "graphviz<0.9", "click<9", "lazy_loader<1", "rich<15", "tomli", "tomli_w"]
    session.install(f"numpy=={numpy}", *needs)
    # Isolated: the clone is no place to import from.
    session.run("python", "-I", "-W", "ignore", "scripts/smoke.py")


@nox.session(venv_backend="none")
def cuda(session: nox.Session) -> None:
    """Run the tests for GPUs on two simulated ones."""
    session.run("scripts/test", "--gpu", *session.posargs, external=True)

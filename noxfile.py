"""Run the suite on every Python found, and as a CPU without avx512 would: `nox`, `nox -s avx2`."""

import os

import nox

nox.options.sessions = ["tests", "avx2"]
nox.options.error_on_missing_interpreters = False

# As scripts/test has it.
PARALLEL = ["-n", str(min(os.cpu_count() or 1, 4)), "--dist", "worksteal"]
PYTHONS = ["3.8", "3.9", "3.10", "3.11", "3.12"]


def install(session: nox.Session) -> None:
    """Install mxamp as the scripts do."""
    session.install("-e", ".[cpu,test]", "-c", "scripts/constraints.txt")
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

"""Run programs in plain MXNet and with mixed precision, and compare them. May crash."""

import os
import warnings
from typing import Any, Dict, List, Tuple

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np

from mxamp.graph.speed import substitutions

#: Relative size of the errors that stand for rounding, by policy.
EPSILON = {"float32": 2.0**-22, "bfloat16": 2.0**-9, "float16": 2.0**-11}
#: A float32 is rounded to the policy's bits by the difference of two of its multiples (Veltkamp).
ROUND = {"float32": 0.0, "bfloat16": 2.0**16 + 1, "float16": 2.0**13 + 1}
#: The relative L2 error that always passes.
ALLOWED = {"float32": 3e-5, "bfloat16": 4e-2, "float16": 1e-2}
#: The error may be this many times the error caused by noise.
MARGIN = {"float32": 30, "bfloat16": 6, "float16": 6}
#: Errors below this norm, relative to the largest, are ignored: sums cancel.
LEAST = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 2e-3}
#: Larger values, or their gradients, may overflow in float16.
LARGE = 100.0

Arrays = List[Tuple[str, Any]]


def serve(pipe: Any, planted: str = "") -> None:
    """Run each program that the pipe receives, and send its result back.

    "plain" says that plain MXNet has run it; "suspect" that it differs, before rounding errors are
    estimated. `planted`, such as "mean=sum", plants a defect for tests of the fuzzer: one
    substitution builds another's equivalent.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    warnings.simplefilter("ignore")
    if planted:
        name, other = planted.split("=")
        wrong = substitutions.ALL[name]._replace(build=substitutions.ALL[other].build)
        substitutions.ALL = {**substitutions.ALL, name: wrong}
    pipe.send(("ready", ""))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(compare(pipe, **task))


def compare(
    pipe: Any, source: str, noisy: str, policy: str, special: bool, dtypes: bool
) -> Tuple[str, str]:
    """Run a program in plain MXNet and with mxamp; return the kind and the text of the result."""
    try:
        plain = execute(source, amp_on=False)
        mx.nd.waitall()
    except Exception as error:
        return "invalid", first_line(error)
    pipe.send(("plain", ""))
    try:
        found = execute(source, amp_on=True)
        mx.nd.waitall()
    except amp.AmpError as error:
        return "refused", first_line(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {first_line(error)}"
    finally:
        amp.shutdown()
    if not dtypes:
        found = [(name, one.astype("float32", copy=False)) for name, one in found]
    suspects = differing(plain, found, policy, special)
    if not suspects:
        return "equal", ""
    if not special:
        text = "; ".join(f"{name}: {text}" for name, text in suspects.items())
        pipe.send(("suspect", f"{text}; rounding unknown"))
        suspects = unexplained(plain, found, noisy, policy, suspects)
    if not suspects:
        return "imprecise", ""
    return "different", "; ".join(f"{name}: {text}" for name, text in suspects.items())


def first_line(error: BaseException) -> str:
    """Return the line of an error's message that names the error, or the first one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line or "Check failed" in line]
    return (said or lines or [type(error).__name__])[0][:300]


def execute(source: str, amp_on: bool, **variables: Any) -> Arrays:
    """Run a program's source with these global variables; return its named arrays."""
    space: Dict[str, Any] = {"__name__": "program"}
    mx.random.seed(0)
    # MXNet's counters of names start at zero for each program, as in a script.
    with mx.name.NameManager():
        exec(compile(source, "program", "exec"), space)  # noqa: S102
        space.update(AMP=amp_on, **variables)
        return list(space["run"]())


def differing(plain: Arrays, found: Arrays, policy: str, special: bool) -> Dict[str, str]:
    """Return a description of each array whose values, shape or dtype differ, by name."""
    if [name for name, _ in plain] != [name for name, _ in found]:
        return {"arrays": f"{[n for n, _ in found]}, not {[n for n, _ in plain]}"[:300]}
    suspects: Dict[str, str] = {}
    for k, ((name, one), (_, other)) in enumerate(zip(plain, found)):
        text = ""
        if one.shape != other.shape or one.dtype != other.dtype:
            text = f"{other.shape} {other.dtype}, not {one.shape} {one.dtype}"
        elif not np.array_equal(np.isfinite(one), np.isfinite(other)):
            count = int((np.isfinite(one) != np.isfinite(other)).sum())
            text = f"{count} of {one.size} elements are finite in one alone"
        elif not special and norm(one, other) > ALLOWED[policy] * norm(one) + LEAST[policy]:
            text = f"relative error {norm(one, other) / max(norm(one), 1e-30):.2g}"
        if text:
            suspects[f"{k} {name}"] = text
    return suspects


def unexplained(
    plain: Arrays, found: Arrays, noisy: str, policy: str, suspects: Dict[str, str]
) -> Dict[str, str]:
    """Return the suspects whose errors are larger than rounding errors in plain MXNet."""
    try:
        words = {"amp_on": False, "EPSILON": EPSILON[policy]}
        exact = execute(noisy, amp_on=False, ROUND=0, EPSILON=0, PHASE=0)
        noises = [execute(noisy, ROUND=0, PHASE=phase, **words) for phase in (1e3, 7e3)]
        if ROUND[policy]:
            noises.append(execute(noisy, ROUND=ROUND[policy], PHASE=0, **words))
        # Larger noise provokes rare events, such as a different greatest element.
        words["EPSILON"] *= 4
        large = [execute(noisy, ROUND=0, PHASE=phase, **words) for phase in (1e3, 7e3, 3e4, 5e4)]
    except Exception:
        return suspects
    if policy == "float16" and any(one.size and not np.abs(one).max() < LARGE for _, one in plain):
        return {}
    left = {}
    largest = max([1.0, *(norm(one) for _, one in exact)]) if policy != "float32" else 1.0
    least = LEAST[policy] * largest
    for k, ((name, one), (_, other)) in enumerate(zip(plain, found)):
        text = suspects.get(f"{k} {name}")
        if text is None:
            continue
        eager, others = exact[k][1], [noise[k][1] for noise in noises]
        # Plain MXNet's graphs are sometimes wrong where its eager calls are right. A difference
        # counts only if both agree.
        if "finite" in text:
            counts = all(np.array_equal(np.isfinite(one), np.isfinite(noise)) for noise in others)
        elif "relative" in text:
            usual = max(norm(eager, noise) for noise in others)
            most = max(norm(eager, noise[k][1]) for noise in large)
            limit = max(MARGIN[policy] * usual, 1.5 * most) + least
            counts = norm(one, other) > limit >= norm(one, eager)
        else:
            counts = True
        if counts:
            left[f"{k} {name}"] = text
    return left


def norm(one: Any, other: Any = 0.0) -> float:
    """Return the L2 norm of `one - other`, without elements that are not finite."""
    with np.errstate(invalid="ignore"):
        difference = np.asarray(one, "float64") - np.asarray(other, "float64")
    return float(np.linalg.norm(difference[np.isfinite(difference)]))

"""The variables that say which loss scale a gradient carries: each new one can contradict others."""

import ast
from pathlib import Path

import mxamp

#: By class or module.
SCALES = {
    "Ledger": {"_records", "_scale", "trainers"},
    "State": {"pending"},
    "LossScaler": {"finite_by_state"},
    "tape": {"_marks"},
    "loss_outputs": {"_recorded"},
    "running": {"_running"},
    "_ScalingPatches": {"_is_ending", "automatic"},
    "_BackwardPatches": {"default_scale", "variables"},
    "_ModuleScaling": {"overflown", "scale"},
}
#: Not about a gradient's scale: what the object is, its settings and counts, and values that are
#: made once and never change.
OTHER = {
    "State": {
        "_unsent", "loaded_masters", "report", "scaled_by", "scaler", "skips", "steps",
        "trainer", "workers",
    },
    "GradScaler": {"_enabled", "_scaler"},
    "LossScaler": {
        "_backoff_factor", "_clean_steps", "_counts", "_growth_factor", "_growth_interval",
        "_hysteresis", "_loss_scale", "_max_scale", "_min_scale", "_overflows_left", "_settings",
        "kind", "skips", "skips_in_a_row", "steps",
    },
    "SharedScale": {"scaled_by", "scaler"},
    "RunningStatistics": {"_age", "_backward_passes", "_has_logged", "_saved"},
    "_ModuleScaling": {"group", "statistics"},
    "_BackwardPatches": {"_has_warned"},
    "BackwardPass": {"frees", "head_grads", "heads", "inner", "outer", "overflown", "scale"},
    "_OutGradients": {"_factor", "_gradients", "was_read"},
    "Layout": {"ctx", "dtype", "in_host_memory", "is_empty", "is_scalar"},
    "finite": {"_layouts"}, "distributed": {"_on_servers"},
    "ScaleMark": {"factor", "product", "scale"}, "Entry": {"data", "gradient", "param"},
    "GradientRecord": {"overflown", "scale", "summed"},
    "Running": {"backward_pass", "frame", "given_scale"},
    "Variable": {"adds", "array"}, "PendingGradients": {"scale", "stage"},
    "StepReport": {"loss_scale", "next_loss_scale", "nonfinite", "stepped"},
}  # fmt: skip


def targets(node):
    found = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [one for t in found for one in (t.elts if isinstance(t, ast.Tuple) else [t])]


def fields(path):
    """Return the fields of a module's classes, and its tables and threads' variables, by owner."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            assigned = [
                one for one in ast.walk(node) if isinstance(one, (ast.Assign, ast.AnnAssign))
            ]
            names = {
                target.attr
                for one in assigned
                for target in targets(one)
                if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"
            }
            annotated = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
            found.setdefault(node.name, set()).update(names | annotated)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            value = node.value
            is_table = isinstance(value, ast.Dict) and not value.keys
            is_local = isinstance(value, ast.Call) and getattr(value.func, "attr", "") == "local"
            if is_table or is_local or (isinstance(value, ast.List) and not value.elts):
                found.setdefault(path.stem, set()).update(one.id for one in targets(node))
    return {owner: names for owner, names in found.items() if names}


def test_the_fields_that_say_what_a_gradient_carries():
    package, found = Path(mxamp.__file__).parent, {}
    for room in ("scaling", "frontends"):
        for path in sorted((package / room).glob("*.py")):
            for owner, names in fields(path).items():
                found.setdefault(owner, set()).update(names)
    expected = {o: SCALES.get(o, set()) | OTHER.get(o, set()) for o in {*SCALES, *OTHER}}
    assert found == expected
    assert sum(map(len, SCALES.values())) == 14

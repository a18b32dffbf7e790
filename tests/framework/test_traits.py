"""lists/operators.toml, held to MXNet's registry and to the code that reads it."""

import ast

import pytest

from helpers import ROOT
from mxamp.framework.data import own_tables
from mxamp.framework.operators import registry, resolve, with_trait

TRAITS = own_tables("operators")
TREES = {
    str(path.relative_to(ROOT / "mxamp")): ast.parse(path.read_text())
    for path in (ROOT / "mxamp").rglob("*.py")
}


@pytest.mark.parametrize("trait", sorted(TRAITS.keys() - {"gluon_layers"}))
def test_names_are_canonical(trait):
    names = [*TRAITS[trait]]
    assert len(names) == len(set(names))
    assert set(names) - {"CuDNNBatchNorm"} <= registry().keys(), "it is in GPU builds only"


def test_values_fit_the_operators():
    for name, attributes in TRAITS["decisive_attributes"].items():
        assert set(attributes) <= set(resolve(name).attributes)
    for name, positions in TRAITS["zero_gradient_inputs"].items():
        assert name not in with_trait("zero_gradients")
        assert max(positions) < len(resolve(name).inputs)
    assert with_trait("loss_outputs") < with_trait("starts_backward")
    assert with_trait("unsafe_loops") < with_trait("loops")
    assert with_trait("batch_norms") < with_trait("keeps_layout")


def test_code_reads_every_trait_and_no_other():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    assert set(TRAITS) <= {node.value for node in nodes if isinstance(node, ast.Constant)}
    asked = {
        node.args[0].value
        for node in nodes
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "with_trait"
        and isinstance(node.args[0], ast.Constant)
    }
    assert asked <= set(TRAITS)


def written_names(node):
    """The strings in a set, list or tuple, the keys of a table, or the words of a text."""
    if isinstance(node, ast.Constant):
        return str(node.value).split()
    items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return [getattr(item, "value", None) for item in items]


@pytest.mark.parametrize("room", ["framework", "graph", "patches", "convert"])
def test_no_other_set_of_operators(room):
    assert not [
        (path, node.lineno)
        for path, tree in TREES.items()
        if path.startswith(room)
        for node in ast.walk(tree)
        if len(names := written_names(node)) >= 3 and set(names) <= registry().keys()
    ]

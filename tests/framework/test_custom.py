import mxnet as mx
import numpy as np
import pytest

from helpers import run_python
from mxamp.framework.custom import needs_head_gradient, prop_class
from mxamp.framework.operators import starts_backward


def register(name, **defaults):
    @mx.operator.register(name)
    class Prop(mx.operator.CustomOpProp):
        def __init__(self, need="1"):
            super().__init__(need_top_grad=defaults.get("need", bool(int(need))))

    return Prop


@pytest.mark.parametrize("need", [True, False])
def test_what_the_class_was_made_with(need):
    cls = register(f"custom_{need}", need=need)
    assert prop_class(f"custom_{need}") is cls
    assert needs_head_gradient(f"custom_{need}", {}) == need
    attributes = {"op_type": f"custom_{need}", "__ctx_group__": "a"}
    assert starts_backward("Custom", attributes) != need


def test_attributes_go_to_the_constructor_as_strings():
    register("custom_by_attribute")
    assert needs_head_gradient("custom_by_attribute", {"need": 1})
    assert not needs_head_gradient("custom_by_attribute", {"op_type": "x", "need": 0})


def test_the_last_of_two_classes_of_one_name_counts():
    register("custom_twice", need=True)
    assert needs_head_gradient("custom_twice", {})
    second = register("custom_twice", need=False)
    assert prop_class("custom_twice") is second
    assert not needs_head_gradient("custom_twice", {})


def test_what_cannot_be_told_needs_it():
    register("custom_fails", need=False)
    assert needs_head_gradient("custom_fails", {"unknown": 1})
    assert needs_head_gradient("no_such_operator", {})
    assert not starts_backward("Custom", {})
    register("no_such_operator_yet", need=False)
    assert not needs_head_gradient("no_such_operator_yet", {})


@pytest.mark.slow
@pytest.mark.skipif(
    not np.__version__.startswith("1.23"), reason="MXNet imports here after mxamp only"
)
def test_a_class_registered_before_mxamp_is_imported():
    done = run_python("""
        import mxnet as mx

        @mx.operator.register("early")
        class Prop(mx.operator.CustomOpProp):
            def __init__(self):
                super().__init__(need_top_grad=False)

        from mxamp.framework.operators import starts_backward
        assert starts_backward("Custom", {"op_type": "early"})
    """)
    assert done.returncode == 0, done.stderr

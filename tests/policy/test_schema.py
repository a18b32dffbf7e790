"""Policy files that are wrong: one sentence each, with the file and the table."""

import pytest

import mxamp as amp
from mxamp.policy.policy import Policy

HEAD = 'format = 1\ndtype = "float16"\n'
GROUP = '[[group]]\nclass = "low"\nreason = "fast"\noperators = ["dot"]\n'
CONDITION = (
    '[[conditional]]\noperators = ["Activation"]\nattribute = "act_type"\nvalues = ["softrelu"]\n'
    'otherwise = "neutral"\nreason = "why"\n'
)
MISSING = '[[missing]]\ndevice = "cpu"\noperators = ["dot"]\nreason = "why"\n'
SHAPE = '[[by_shape]]\nrule = "few_rows"\noperators = ["dot"]\nreason = "why"\n'
ALL = HEAD + GROUP + CONDITION + MISSING + SHAPE


@pytest.mark.parametrize("device, more, warned", [
    ("cpu", "", True), ("cpu", MISSING, False), ("gpu", "", False),
    ("cpu", '[[change]]\nwidest = ["exp"]\n', True),
])  # fmt: skip
def test_products_without_a_kernel_are_warned_of(device, more, warned, tmp_path, caplog):
    path = tmp_path / "own.toml"
    path.write_text(HEAD + GROUP + more)
    Policy.load(path, device)
    found = [" no float16 kernel on a CPU for dot:" in line for line in caplog.messages]
    assert found == [True] * warned


def error_of(tmp_path, text):
    path = tmp_path / "own.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(amp.ArgumentError) as raised:
        Policy.load(path)
    message = str(raised.value)
    assert message.count(str(path)) == 1, message
    return message.replace(str(path), "own.toml")


@pytest.mark.parametrize("old, new, expected", [
    (ALL, "", "the key 'format' is missing; it must be 1 or 2"),
    ('"float16"', '"float8"', "dtype must be 'float16', 'bfloat16' or 'float32', not 'float8'"),
    ('reason = "fast"\n', "", "[[group]] table 1: the key 'reason' is missing"),
    ('class = "low"', 'klass = "low"', "[[group]] table 1: unknown key 'klass'; the closest is 'class'"),
    ('"few_rows"', '"few_row"', "unknown rule 'few_row'; the closest is 'few_rows'"),
    ('"few_rows"', '"long_sums"\nlimit = -1', "limit must be a non-negative integer, not -1"),
    ('["softrelu"]', '["softrelu"]\nbeyond_range = true', "give either values or beyond_range"),
    (SHAPE, "[keep_outputs]\nBatchNorm = ['x']", "BatchNorm must be a list of non-negative integers, not"),
    ("[[group]]", "[group]", "group must be a list of tables, not {'class'"),
    (SHAPE, "[[keep_outputs]]\nBatchNorm = [1]", "keep_outputs must be a table, not [{"),
    ('"float16"', '"bfloat16"\ndevice = "gpu"', "MXNet has no bfloat16 kernels on GPUs"),
    (CONDITION, CONDITION + CONDITION + "override = true\n", "[[conditional]] table 2: operator 'Activation' has a class already, 'neutral' with override False"),
    (SHAPE, '[substitutions]\nsumm = "why"\n', "unknown substitution 'summ'; the closest is 'sum'"),
    (GROUP, GROUP + GROUP, "[[group]] table 2: operator 'dot' has a class already, 'low'"),
    (SHAPE, "[[change]]\nfp33 = ['dot']", "unknown argument of Policy.override 'fp33'"),
    ("[[group]]", "[[group", "is not valid TOML: Expected ']]' at the end"),
])  # fmt: skip
@pytest.mark.backend
def test_one_sentence(tmp_path, old, new, expected):
    assert old in ALL
    assert expected in error_of(tmp_path, ALL.replace(old, new, 1))


def test_what_is_no_file(tmp_path):
    for path, words in (
        (tmp_path / "none.toml", "can't be read: No such file"),
        (tmp_path, "can't be read: Is a directory"),
        (None, "not .*NoneType"),
        ("a\0b", "null"),
    ):
        with pytest.raises(amp.ArgumentError, match=words):
            Policy.load(path)


def test_operators_have_any_of_their_names(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        HEAD + GROUP.replace("dot", "concat") + "[keep_inputs]\n_npx_convolution = ['bias']\n"
    )
    policy = Policy.load(path)
    assert policy.rule("Concat").op_class == "low"
    assert policy.rule("Convolution").keep_inputs == ("bias",)

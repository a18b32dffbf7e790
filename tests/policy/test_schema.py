"""Policy files that are wrong: one sentence each, with the file and the table."""

import pytest

import mxamp as amp
from helpers import ROOT
from mxamp.policy.policy import Policy
from mxamp.policy.schema import TABLES, TOP

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
])  # fmt: skip
def test_products_without_a_kernel_are_warned_of(device, more, warned, tmp_path, caplog):
    path = tmp_path / "own.toml"
    path.write_text(HEAD + GROUP + more)
    Policy.load(path, device)
    assert [(" no float16 kernel on a CPU for dot," in line) for line in caplog.messages] == [
        True
    ] * warned


def error_of(tmp_path, text):
    path = tmp_path / "own.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(amp.ArgumentError) as raised:
        Policy.load(path)
    message = str(raised.value)
    assert message.count(str(path)) == 1, message
    assert "\n" not in message
    assert len(message) < 400
    return message.replace(str(path), "own.toml")


def test_the_whole_of_it_is_right(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(ALL)
    policy = Policy.load(path, "cpu")
    assert policy.rule("dot").missing == "why"


@pytest.mark.parametrize(
    "old, new, expected",
    [
        # ------------------------------------------------------------------ the top
        (ALL, "", "the key 'format' is missing; it must be 1"),
        (ALL, "format = 1\n", "the key 'dtype' is missing; it must be 'float16' or 'bfloat16'"),
        (ALL, HEAD, "it has no [[group]] and no [[conditional]] table"),
        ("format = 1", "format = 2", "format must be 1, not 2"),
        ("format = 1", "format = true", "format must be 1, not True"),
        ('"float16"', '"float8"', "dtype must be 'float16' or 'bfloat16', not 'float8'"),
        ('"float16"', "16", "not 16"),
        ("format = 1", "format = 1\ndevise = 3", "unknown key 'devise'"),
        ("[[conditional]]", "[[conditionals]]", "the closest is 'conditional'"),
        (ALL, HEAD + "group = 3", "group must be written as [[group]], tables, not as 3"),
        ("[[group]]", "[group]", "group must be written as [[group]], tables, not as one [table]"),
        (ALL, HEAD + GROUP + GROUP.replace("[[group]]", "[group]"), "have two brackets: [[group]]"),
        (ALL, GROUP + HEAD, "the key 'format' is missing; it must be 1, above the first table"),
        ('"softrelu"', '"softRelu"', "the closest is 'softrelu'"),
        (SHAPE, "[[keep_inputs]]\nx = 1", "keep_inputs must be written as [keep_inputs], one table, not as [[tables]]"),
        ("[[conditional]]", "[[missing]]\ndevice = 'gpu'\nunless = 'avx512'\noperators = ['dot']\nreason = 'x'\n[[conditional]]", "'unless' names CPU instructions"),
        (SHAPE, MISSING + "computes = 'float64'\n", "computes in float64 here and in float32 in another [[missing]] table"),
        (SHAPE, "[slower]\nConvolutoin = 'x'", "[slower]: unknown operator 'Convolutoin'"),
        (SHAPE, "[keep_inputs]\ndot = ['lhs']\n[follow_inputs]\ndot = ['lhs']", "input 'lhs' of dot is in [follow_inputs]"),
        ('["dot"]\n' , '[]\n', "operators must be a list of strings that is not empty, not []"),
        ('"act_type"', "[]", "attribute must be a string or a list of strings, not []"),
        # ------------------------------------------------------------------ keys of tables
        ('reason = "fast"\n', "", "[[group]] table 1: the key 'reason' is missing"),
        ('reason = "fast"\n', "reason = ' '\n", "reason must be a string that is not empty"),
        ('class = "low"\n', "", "[[group]] table 1: the key 'class' is missing; it must be 'low',"),
        ('"low"', '"lower"', "[[group]] table 1: class must be 'low', 'fp32', 'widest', 'neutral'"),
        ('class = "low"', 'klass = "low"', "[[group]] table 1: unknown key 'klass'; the closest is 'class'"),
        ('"low"', '"low"\notherwise = "fp32"', "unknown key 'otherwise'"),
        ('operators = ["dot"]', 'operators = "dot"', "operators must be a list of strings that is not empty, not 'dot'"),
        ('operators = ["dot"]', "operators = [1]", "operators must be a list of strings that is not empty, not [1]"),
        ('device = "cpu"', 'device = "tpu"', "[[missing]] table 1: device must be 'cpu' or 'gpu'"),
        (MISSING, MISSING + 'unless = "avx"\n', "unless must be 'avx512', 'avx512_bf16' or 'amx_bf16'"),
        (MISSING, MISSING + 'computes = "float8"\n', "computes must be 'float32' or 'float64'"),
        ('"few_rows"', '"many_rows"', "[[by_shape]] table 1: rule must be 'few_rows', 'odd_channels'"),
        ('"few_rows"', '"long_sums"', "rule 'long_sums' needs the key 'limit'"),
        ('"few_rows"', '"few_rows"\nlimit = 3', "rule 'few_rows' takes no 'limit'"),
        ('"few_rows"', '"long_sums"\nlimit = -1', "limit must be a whole number from 0, not -1"),
        ('"few_rows"', '"long_sums"\nlimit = true', "limit must be a whole number from 0, not True"),
        ('["softrelu"]', '["softrelu"]\nbeyond_range = 1', "beyond_range must be true or false, not 1"),
        ('["softrelu"]', '["softrelu"]\nbeyond_range = true', "give either values or beyond_range"),
        ('values = ["softrelu"]', "", "[[conditional]] table 1: give either values or beyond_range"),
        ('"neutral"', '"low-ish"', "otherwise must be 'low'"),
        (SHAPE, '[substitutions]\nrelu7 = "faster"', "unknown substitution 'relu7'"),
        (SHAPE, "[substitutions]\nrelu = 3", "[substitutions]: relu must be a string that is not empty"),
        (SHAPE, "[keep_outputs]\nBatchNorm = ['x']", "BatchNorm must be a list of whole numbers"),
        # ------------------------------------------------------------------ what is saved
        ("format = 1", 'format = 1\ndevice = "tpu"', "device must be 'cpu' or 'gpu', not 'tpu'"),
        ('"float16"', '"bfloat16"\ndevice = "gpu"', "MXNet has no bfloat16 kernels on GPUs"),
        ("format = 1", "format = 1\nfp32_layers = 'a'", "fp32_layers must be a list of strings, not 'a'"),
        ("format = 1", "format = 1\nlower_custom_operators = 0", "lower_custom_operators must be true or false, not 0"),
        ('reason = "fast"', 'reason = "fast"\noverride = 1', "[[group]] table 1: override must be true or false, not 1"),
        (CONDITION, CONDITION + CONDITION + "override = true\n", "[[conditional]] table 2: operator 'Activation' has override = true here and false in [[conditional]] table 1"),
        (SHAPE, "[evidence]\nseed = 0", "unknown key 'evidence'"),
        # ------------------------------------------------------------------ names of MXNet
        ('"dot"', '"dott"', "[[group]] table 1: unknown operator 'dott'; the closest"),
        ('"dot"', '"Dense"', "unknown operator 'Dense'; MXNet calls it 'FullyConnected'"),
        ('"dot"', '"concat"', "[[group]] table 1: 'concat' is an alias; write 'Concat'"),
        ('"dot"', '"dot", "dot"', "operator 'dot' is listed twice in [[group]] table 1"),
        (GROUP, GROUP + GROUP, "'dot' is listed in [[group]] table 1 and in [[group]] table 2"),
        (GROUP, GROUP.replace("dot", "Activation"), "in [[group]] table 1 and in [[conditional]] table 1"),
        ("act_type", "act_typ", "[[conditional]] table 1: unknown attribute of Activation 'act_typ'"),
        (CONDITION, CONDITION + CONDITION.replace("neutral", "low"), "otherwise 'low' here and 'neutral'"),
        (MISSING, MISSING.replace("dot", "dott"), "[[missing]] table 1: unknown operator 'dott'"),
        (MISSING, MISSING.replace("dot", "dott").replace("cpu", "gpu"), "unknown operator 'dott'"),
        (SHAPE, SHAPE.replace("dot", "exp"), "[[by_shape]] table 1: operator 'exp' has no class"),
        (SHAPE, "[keep_inputs]\nBatchNorm = ['gama']", "unknown input of BatchNorm 'gama'; the closest"),
        (SHAPE, "[follow_inputs]\nconcat = ['x']", "[follow_inputs]: 'concat' is an alias"),
        (SHAPE, "[keep_outputs]\nBatchNrm = [1]", "[keep_outputs]: unknown operator 'BatchNrm'"),
        # ------------------------------------------------------------------ no TOML
        ("[[group]]", "[[group", "is not valid TOML: Expected ']]' at the end"),
        ("[[group]]", "[[group", "(at line 3, column"),
    ],
)  # fmt: skip
def test_one_sentence(tmp_path, old, new, expected):
    assert old in ALL
    assert expected in error_of(tmp_path, ALL.replace(old, new, 1))


@pytest.mark.parametrize(
    "content, words",
    [(b"\xff\xfe\x00", "not UTF-8 text"), (b"a = " + b"[" * 100_000, "nested too deeply")],
)
def test_files_that_are_no_text(tmp_path, content, words):
    assert f"is not valid TOML: {words}" in error_of(tmp_path, content).replace("it is ", "")


def test_what_is_no_file(tmp_path):
    for path, words in (
        (tmp_path / "none.toml", "there is no policy file"),
        (tmp_path, "is a folder"),
        (3, "must be given by its path, not by 3"),
        (None, "not by None"),
        ("a\0b", "null"),
    ):
        with pytest.raises(amp.ArgumentError, match=words):
            Policy.load(path)


def test_the_page_describes_every_key():
    page = (ROOT / "docs" / "policy-files.md").read_text()
    for name, table in TABLES.items():
        assert f"[{name}]" in page
        for key in table.keys:
            assert name == "exempt" or f"| `{key}` |" in page, (name, key)
    assert all(f"| `{key}` |" in page for key in TOP)

"""Saved models: damaged files, and two files replaced as one by several processes."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import mxamp as amp
from helpers import randn
from mxamp.convert import saved
from mxamp.convert.saved import load_model

# MXNet's, of any symbol with casts.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot decide type")

PART = ("symbol.json", "0000.params")
BFLOAT16 = {"target_dtype": "bfloat16"}


def model(number):
    """Return a model of the same layers, names and shapes each time, whose outputs are number squared."""
    x = mx.sym.BatchNorm(mx.sym.var("data"), name="bn")
    symbol = mx.sym.FullyConnected(x, num_hidden=2, no_bias=True, name="fc") * float(number)
    args = {"fc_weight": mx.nd.full((2, 4), number / 4)}
    args.update(bn_gamma=mx.nd.ones((4,)), bn_beta=mx.nd.zeros((4,)))
    return symbol, args, {"bn_moving_mean": mx.nd.zeros((4,)), "bn_moving_var": mx.nd.ones((4,))}


@pytest.fixture
def folder(tmp_path):
    for number in (3, 5):
        mx.model.save_checkpoint(str(tmp_path / f"model{number}"), 0, *model(number))
    mx.nd.waitall()
    out = tmp_path / "out"
    out.mkdir()
    return out


def convert(folder, number, **options):
    amp.convert_files(
        folder.parent / f"model{number}", folder / "m", force=True, **{**BFLOAT16, **options}
    )


def content(folder):
    paths = [folder / f"m-{part}" for part in PART]
    return [path.read_bytes() if path.exists() else None for path in paths]


def by_block(prefix):
    net = gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params")
    return net(mx.nd.ones((1, 4)))


def by_module(prefix):
    module = mx.mod.Module.load(str(prefix), 0, label_names=None)
    module.bind([("data", (1, 4))], for_training=False)
    module.forward(mx.io.DataBatch([mx.nd.ones((1, 4))], []), is_train=False)
    return module.get_outputs()[0]


def by_bind(prefix):
    return bound(*mx.model.load_checkpoint(str(prefix), 0))


def by_mxamp(prefix):
    return bound(*load_model(prefix))


def bound(symbol, args, auxs):
    args = {"data": mx.nd.ones((1, 4)), **args}
    executor = symbol.bind(mx.cpu(), args, aux_states=auxs, grad_req="null")
    return executor.forward()[0]


READERS = [by_block, by_module, by_bind, by_mxamp]


# ---------------------------------------------------------------------- damaged files


def damaged(**changes):
    """Return the change of a symbol's data: of keys, or of keys of a node by its number."""

    def change(data):
        for key, value in changes.items():
            node, _, name = key.partition("_")
            owner = data["nodes"][int(node[1:])] if name else data
            owner.pop(name or key)
            if value is not None:
                owner[name or key] = value
        return json.dumps(data).encode()

    return change


DAMAGED = {
    "a cycle": damaged(n1_inputs=[[3, 0, 0]]),
    "a bad index": damaged(n3_inputs=[[70, 0, 0]]),
    "a negative index": damaged(n3_inputs=[[-1, 0, 0]]),
    "a bad head": damaged(heads=[[90, 0, 0]]),
    "no name": damaged(n0_name=None),
    "no nodes": damaged(nodes=7),
    **{str(text[:9]): lambda _, text=text: text
       for text in (b"", b'{"nodes": [', b"[" * 100000, b"\xff\xfe\x00", b"[]", b"null")},
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_damaged_symbols_are_refused_in_one_sentence(folder, damage):
    path = folder.parent / "model3-symbol.json"
    path.write_bytes(damage(json.loads(path.read_text())))
    with pytest.raises(amp.ArgumentError, match=r"model3-symbol\.json") as raised:
        load_model(folder.parent / "model3")
    assert "\n" not in str(raised.value)


def test_parameters_of_another_model_are_refused(folder, caplog):
    symbol, args, auxs = model(3)
    mx.model.save_checkpoint(str(folder / "m"), 0, symbol, {**args, "x_weight": randn(2)}, auxs)
    load_model(folder / "m")
    assert "1 that the symbol does not have (x_weight)" in caplog.text
    del args["fc_weight"]
    mx.model.save_checkpoint(str(folder / "m"), 0, symbol, args, auxs)
    with pytest.raises(amp.ArgumentError, match=r"1 missing \(fc_weight\), and 0 that"):
        load_model(folder / "m")


# ---------------------------------------------------------------------- names that fit one pair


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("before", ["plain", "converted", "fused"])
def test_one_file_of_each_pair_is_an_error_for_every_reader(folder, before, read):
    if before == "plain":
        for part in PART:
            shutil.copy(folder.parent / f"model3-{part}", folder / f"m-{part}")
    else:
        convert(folder, 5)
        convert(folder, 3, fuse=before == "fused")
    old = content(folder)
    convert(folder, 5)
    new = content(folder)
    for pair, wanted in ((new, 25), (old, 9)):
        for part, one in zip(PART, pair):
            (folder / f"m-{part}").write_bytes(one)
        np.testing.assert_allclose(read(folder / "m").asnumpy(), [[wanted] * 2], rtol=0.02)
    for pair in ((old[0], new[1]), (new[0], old[1])):
        for part, one in zip(PART, pair):
            (folder / f"m-{part}").write_bytes(one)
        # AssertionError, ValueError, RuntimeError, ArgumentError: each reader has its own.
        with pytest.raises(Exception, match="missing|not in the arguments|not presented"):
            read(folder / "m")
            mx.nd.waitall()


def test_names_stay_where_there_is_nothing_to_mix_with(folder):
    convert(folder, 3)
    first, names = content(folder), set(load_model(folder / "m")[1])
    assert names == {"fc_weight", "bn_gamma", "bn_beta"}
    convert(folder, 3)
    assert content(folder) == first
    convert(folder, 5)
    second, names = content(folder), set(load_model(folder / "m")[1])
    assert {name[12:] for name in names} == {"fc_weight", "bn_gamma", "bn_beta"}
    convert(folder, 5)
    assert content(folder) == second
    # What was renamed converts again.
    amp.convert_files(folder / "m", folder / "again", **BFLOAT16)
    assert set(load_model(folder / "again")[1]) == names


def test_models_of_numpy_are_renamed_too(folder):
    mx.npx.set_np()
    for units in (3, 4):
        net = gluon.nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(gluon.nn.Dense(units, in_units=4), gluon.nn.BatchNorm(in_channels=units))
        net.initialize()
        net.hybridize()
        out = net(mx.np.ones((1, 4)))
        net.export(str(folder.parent / f"np{units}"))
        amp.convert_files(folder.parent / f"np{units}", folder / "m", force=True, **BFLOAT16)
        found = gluon.SymbolBlock.imports(
            str(folder / "m-symbol.json"), ["data"], str(folder / "m-0000.params")
        )(mx.np.ones((1, 4)))
        np.testing.assert_allclose(found.asnumpy(), out.asnumpy(), rtol=0.03, atol=0.03)
    assert all(name.startswith("amp") for name in load_model(folder / "m")[1])


def test_blocks_that_are_exported_over_another_model(folder):
    convert(folder, 3)
    net = gluon.nn.Dense(2, in_units=4, prefix="fc_")
    net.initialize()
    x = mx.nd.ones((1, 4))
    converted = amp.convert_hybrid_block(net, example_inputs=x, **BFLOAT16)
    converted.export(str(folder / "m"))
    assert all(name.startswith("amp") for name in load_model(folder / "m")[1])
    found = gluon.SymbolBlock.imports(
        str(folder / "m-symbol.json"), ["data"], str(folder / "m-0000.params")
    )
    np.testing.assert_allclose(found(x).asnumpy(), converted(x).asnumpy(), rtol=0.02)


# ---------------------------------------------------------------------- errors amid


def os_error(number):
    return OSError(number, os.strerror(number))


EIO = os_error(errno.EIO)


def fails_at(monkeypatch, steps, owner=Path, name="replace", error=EIO):
    """Make calls of a function fail whose numbers are among `steps`."""
    real, calls = getattr(owner, name), []

    def function(*args, **options):
        calls.append(args)
        if len(calls) in steps:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(owner, name, function)
    return calls


REPLACE = Path.replace


PLACES = ["nothing", "files", "no hard links", "links", "one link", "link to a folder"]


@pytest.fixture(params=PLACES)
def place(request, folder, tmp_path, monkeypatch):
    """A folder to convert to: of files, or of links to the files in `folder`."""
    if request.param == "nothing":
        return folder
    convert(folder, 3)
    if request.param == "no hard links":
        fails_at(monkeypatch, range(9), saved.os, "link", os_error(errno.EPERM))
    place = tmp_path / "place"
    if request.param == "link to a folder":
        place.symlink_to(folder)
    if request.param in ("files", "no hard links", "link to a folder"):
        return place if place.exists() else folder
    place.mkdir()
    for part in PART:
        if request.param == "links" or part == PART[0]:
            (place / f"m-{part}").symlink_to(Path("..") / "out" / f"m-{part}")
        else:
            shutil.move(folder / f"m-{part}", place / f"m-{part}")
    return place


def hidden(*folders):
    return [name for folder in folders for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.matrix
@pytest.mark.parametrize("error", [EIO, KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_failure_while_the_files_are_moved_leaves_the_old_pair(
    place, folder, step, error, monkeypatch
):
    before = content(place)
    links = [(place / f"m-{part}").is_symlink() for part in PART]
    wanted = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else amp.WriteError
    with monkeypatch.context() as patch:
        fails_at(patch, [step], error=error)
        with pytest.raises(wanted) as raised:
            convert(place, 5)
    assert wanted is KeyboardInterrupt or "is unchanged" in str(raised.value)
    assert content(place) == before
    assert not hidden(place, folder)
    convert(place, 5)
    assert by_block(place / "m").asnumpy().tolist() == [[25, 25]]
    assert not hidden(place, folder)
    assert links == [(place / f"m-{part}").is_symlink() for part in PART]


def test_links_to_another_file_system_are_refused(folder):
    (folder / "m-symbol.json").symlink_to("/dev/shm/m-symbol.json")
    if os.stat("/dev/shm").st_dev == os.stat(folder).st_dev:
        pytest.skip("one file system")
    with pytest.raises(amp.ArgumentError, match="another file system"):
        convert(folder, 5)


def test_an_error_that_can_not_be_undone_says_so(folder, monkeypatch):
    convert(folder, 3)
    with monkeypatch.context() as patch:
        fails_at(patch, range(3, 9))
        with pytest.raises(amp.WriteError, match="of different models now.*write them again"):
            convert(folder, 5)
    with pytest.raises(AssertionError, match="missing"):
        by_block(folder / "m")
    convert(folder, 5)
    assert by_block(folder / "m").asnumpy().tolist() == [[25, 25]]


def test_a_folder_that_is_not_synced_after_all(folder, monkeypatch):
    convert(folder, 3)
    real = saved.sync_to_disk
    synced = []

    def fails(path):
        synced.append(path)
        if synced.count(folder) == 2:
            raise EIO
        real(path)

    monkeypatch.setattr(saved, "sync_to_disk", fails)
    with pytest.raises(amp.WriteError, match="is replaced, but the disk has not confirmed it"):
        convert(folder, 5)
    assert by_block(folder / "m").asnumpy().tolist() == [[25, 25]]


@pytest.mark.parametrize("link", PART)
def test_one_file_that_is_a_link_to_the_other(folder, link):
    convert(folder, 3)
    (other,) = set(PART) - {link}
    (folder / f"m-{link}").unlink()
    (folder / f"m-{link}").symlink_to(f"m-{other}")
    before = content(folder)
    with pytest.raises(amp.ArgumentError, match="lead to one file"):
        convert(folder, 5)
    assert content(folder) == before


def test_other_names_of_a_file_keep_its_content(folder):
    for part in PART:
        os.link(folder.parent / f"model3-{part}", folder / f"m-{part}")
    convert(folder, 5)
    assert by_block(folder / "m").asnumpy().tolist() == [[25, 25]]
    np.testing.assert_allclose(by_block(folder.parent / "model3").asnumpy(), 9, rtol=0.01)


def dies_at(stage):
    """Return a patch of functions whose calls are counted: call number `stage` kills the process."""
    steps = iter(range(100))

    def dying(function):
        def step(*args, **options):
            if next(steps) == stage:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return step

    return dying


def write(paths, text):
    with saved.replaced_files(paths) as (folder, _):
        for path in paths:
            (folder / path.name).write_text(text)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_killed_at_any_step_leaves_one_of_the_two_pairs(tmp_path, linked):
    folder, places = tmp_path / "folder", tmp_path / "out"
    folder.mkdir()
    places.mkdir()
    paths = [folder / f"m-{part}" for part in PART]
    for path in paths if linked else ():
        path.symlink_to(places / path.name)
    for stage in range(9):
        for path in paths:
            path.write_text("old")
        child = os.fork()
        if not child:
            try:
                dying = dies_at(stage)
                saved.sync_to_disk = dying(saved.sync_to_disk)
                Path.replace, Path.rmdir = dying(REPLACE), dying(Path.rmdir)
                write(paths, "new")
            finally:
                os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        with pytest.raises(amp.ArgumentError):  # these are no models, but the pair is put right
            load_model(folder / "m")
        assert len({path.read_text() for path in paths}) == 1, stage
    write(paths, "last")
    assert {path.read_text() for path in paths} == {"last"}
    names = sorted(path.name for path in paths)
    assert sorted(os.listdir(folder)) == names
    assert sorted(os.listdir(places)) == (names if linked else [])


# ---------------------------------------------------------------------- several at once


@pytest.mark.slow
def test_writes_and_reads_wait_for_another_write(folder):
    convert(folder, 3)
    before = content(folder)
    with saved.folder_lock(folder) as is_locked:
        assert is_locked
        thread = threading.Thread(target=convert, args=(folder, 5))
        thread.start()
        thread.join(1)
        assert thread.is_alive()
        assert content(folder) == before
        reader = threading.Thread(target=load_model, args=(folder / "m",))
        reader.start()
        reader.join(0.2)
        assert reader.is_alive()
    thread.join(60)
    reader.join(60)
    assert by_block(folder / "m").asnumpy().tolist() == [[25, 25]]


def test_where_folders_have_no_locks_all_are_renamed(folder, monkeypatch):
    fails_at(monkeypatch, range(9), fcntl, "flock", os_error(errno.EBADF))
    convert(folder, 3)
    assert all(name.startswith("amp") for name in load_model(folder / "m")[1])
    assert by_block(folder / "m").asnumpy().tolist() == [[9, 9]]


def test_files_that_appear_during_a_conversion_are_not_overwritten(folder, monkeypatch):
    real = saved.folder_lock

    def late(path):
        (folder / "m-symbol.json").write_text("another's")
        return real(path)

    monkeypatch.setattr(saved, "folder_lock", late)
    with pytest.raises(amp.ArgumentError, match="is there already"):
        amp.convert_files(folder.parent / "model3", folder / "m", **BFLOAT16)
    assert os.listdir(folder) == ["m-symbol.json"]


def value_or_none(read, prefix):
    """Return what a model computes; None where MXNet refuses to read it."""
    try:
        return round(float(read(prefix).asnumpy()[0, 0]))
    except Exception:
        if read is by_mxamp:
            raise
        return None


@pytest.mark.slow
def test_four_processes_that_convert_into_one_target(folder):
    code = """
        import sys
        import mxamp as amp
        folder, number = sys.argv[1:]
        for _ in range(8):
            source = f"{folder}/../model{number}"
            amp.convert_files(source, f"{folder}/m", target_dtype="bfloat16", force=True)
    """
    convert(folder, 3)
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(folder)]
    writers = [subprocess.Popen([*command, number]) for number in "3535"]
    found, refused = {9: 0, 25: 0}, 0
    while any(writer.poll() is None for writer in writers):
        for read in READERS:
            value = value_or_none(read, folder / "m")
            if value is None:
                refused += 1
            else:
                found[value] += 1
    assert [writer.returncode for writer in writers] == [0] * 4
    assert all(found.values())
    assert refused < sum(found.values())
    assert not hidden(folder)

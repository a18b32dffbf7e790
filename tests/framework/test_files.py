"""Files that mxamp writes: replaced whole, read back, or left as they were with one sentence."""

import os
import stat

import mxnet as mx
import pytest

import mxamp as amp
from helpers import initialized, randn
from mxamp.framework import files
from mxamp.framework.files import check_writable, write_file
from training import setup

NET = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=64, name="fc")
PARAMS = {"fc_weight": randn(64, 1024), "fc_bias": randn(64)}


def save_model(folder, name="model"):
    mx.model.save_checkpoint(str(folder / name), 0, NET, PARAMS, {})
    mx.nd.waitall()


class Bytes:
    names = ("file",)

    def write(self, folder, content=b"new" * 50000):
        write_file(folder / "file", content)


class States:
    names = ("states",)

    def write(self, folder):
        _, trainer = setup(scaler=amp.LossScaler(init_scale=8), momentum=0.9)
        trainer.save_states(str(folder / "states"))


class Convert:
    names = ("low-symbol.json", "low-0000.params")

    def write(self, folder):
        source = folder.parent
        save_model(source)
        amp.convert_files(source / "model", folder / "low", target_dtype="bfloat16", force=True)


class Export:
    names = ("low-symbol.json", "low-0000.params")

    def write(self, folder):
        net = initialized(mx.gluon.nn.Dense(4))
        low = amp.convert_hybrid_block(net, "bfloat16", example_inputs=randn(2, 8))
        low.export(str(folder / "low"))


WRITERS = [Bytes(), States(), Convert(), Export()]


@pytest.fixture(params=WRITERS, ids=lambda writer: type(writer).__name__)
def writer(request):
    return request.param


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    return path


def content(folder, names):
    return [(folder / name).read_bytes() for name in names]


def refused(writer, folder, words, error=amp.WriteError):
    with pytest.raises(error) as raised:
        writer.write(folder)
    text = str(raised.value)
    assert words in text
    assert "\n" not in text
    assert "mxamp-new" not in text


def full(*_, **__):
    raise OSError(28, "No space left on device")


def nothing_left(folder, names):
    assert sorted(os.listdir(folder)) == sorted(names)


@pytest.mark.parametrize("fault", ["fsync", "replace", "checksum"])
def test_old_files_stay_where_writing_fails(writer, folder, fault, monkeypatch):
    writer.write(folder)
    before = content(folder, writer.names)
    real = files.sync_to_disk

    def cut_off(path):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)
        real(path)

    if fault == "checksum":
        monkeypatch.setattr(files, "sync_to_disk", cut_off)
    else:
        monkeypatch.setattr(files.os, fault, full)
    refused(writer, folder, "read back differs" if fault == "checksum" else "No space left")
    monkeypatch.undo()
    assert content(folder, writer.names) == before
    nothing_left(folder, writer.names)
    writer.write(folder)


def test_no_folder(writer, tmp_path):
    refused(writer, tmp_path / "none", "there is no folder", amp.ArgumentError)
    (tmp_path / "file").write_text("")
    refused(writer, tmp_path / "file", "there is no folder", amp.ArgumentError)
    assert not (tmp_path / "none").exists()


def test_the_name_of_a_folder(writer, folder):
    (folder / writer.names[0]).mkdir()
    refused(writer, folder, "is a folder", amp.ArgumentError)
    nothing_left(folder, writer.names[:1])


def test_links_and_modes_stay_and_targets_are_replaced(writer, folder, tmp_path):
    for name in writer.names:
        (tmp_path / "real").mkdir(exist_ok=True)
        (tmp_path / "real" / name).write_text("old")
        (tmp_path / "real" / name).chmod(0o640)
        (folder / name).symlink_to(os.path.join("..", "real", name))
    writer.write(folder)
    for name in writer.names:
        assert (folder / name).is_symlink()
        assert (tmp_path / "real" / name).read_bytes() != b"old"
        assert stat.S_IMODE((tmp_path / "real" / name).stat().st_mode) == 0o640
    nothing_left(folder, writer.names)
    nothing_left(tmp_path / "real", writer.names)


@pytest.mark.parametrize("out", [".", "..", "folder/", "folder/.", "/"])
def test_models_are_not_written_to_a_prefix_without_a_name(folder, out, monkeypatch):
    monkeypatch.chdir(folder.parent)
    save_model(folder.parent)
    net = initialized(mx.gluon.nn.Dense(4))
    low = amp.convert_hybrid_block(net, "bfloat16", example_inputs=randn(2, 8))
    for write in (low.export, lambda to: amp.convert_files("model", to, force=True)):
        with pytest.raises(amp.ArgumentError, match="has no name"):
            write(out)
    nothing_left(folder, [])
    nothing_left(folder.parent, ["folder", "model-0000.params", "model-symbol.json"])


@pytest.mark.parametrize(
    "name, error, words",
    [
        ("n" * 300, amp.WriteError, "name too long"),
        ("a\0b", ValueError, "null byte"),
        ("", amp.ArgumentError, "is a folder"),
    ],
)
def test_names_that_no_file_can_have(folder, name, error, words):
    with pytest.raises(error, match=words):
        write_file(folder / name, b"")


@pytest.mark.parametrize("name", ["n" * 255, "\N{SNOWMAN}" * 85, "n" * 200, "n" * 201])
def test_names_as_long_as_the_file_system_allows(folder, name):
    check_writable(folder / name)
    write_file(folder / name, b"new")
    assert (folder / name).read_bytes() == b"new"
    nothing_left(folder, [name])


def test_models_of_long_names_replace_their_own_files(folder):
    save_model(folder.parent)
    names = [letter * 240 for letter in "ab"]
    options = {"target_dtype": "bfloat16", "force": True}
    for name in (*names, names[0]):
        amp.convert_files(folder.parent / "model", folder / name, **options)
    ends = "-symbol.json", "-0000.params"
    nothing_left(folder, [f"{name}{end}" for name in names for end in ends])


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_processes_replace_files_one_after_the_other(folder):
    """Each writes its own number to two files, and never finds another's set aside."""
    paths, children = [folder / "a", folder / "b"], []
    for number in range(4):
        child = os.fork()
        if not child:
            status = 1
            try:
                for _ in range(50):
                    with files.replaced_files(paths, lambda _: None) as written:
                        for path in written:
                            path.write_text(str(number))
                    with files.locked(paths[0]):
                        texts = {path.read_text() for path in paths}
                        assert len(texts) == 1
                        assert not files.leftovers(paths[0])
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    nothing_left(folder, ["a", "b"])


def test_orphans_are_removed_after_an_hour(folder):
    for seconds in (0, files._ORPHANED + 60):
        orphan = folder / f".model[1]{files._NEW}1-1"
        orphan.write_text("")
        os.utime(orphan, (0, orphan.stat().st_mtime - seconds))
        write_file(folder / "model[1]", b"")
        assert orphan.exists() == (not seconds)


def test_what_can_not_be_written_is_known_before(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"

    monkeypatch.setattr("pathlib.Path.touch", full)
    with pytest.raises(amp.WriteError, match="'.*new' can't be written .No space left"):
        check_writable(tmp_path / "new")

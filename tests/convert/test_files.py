"""Files of models: replaced as a pair, read back, refused in one sentence where damaged."""

import json
import os
import signal
import textwrap

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import randn, run_forked
from mxamp.convert.pairs import replaced_files
from mxamp.convert.saved import load_model

PART = ("symbol.json", "0000.params")


@pytest.fixture
def saved(tmp_path):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
    params = {"fc_weight": randn(4, 8), "fc_bias": randn(4, seed=1)}
    mx.model.save_checkpoint(str(tmp_path / "model"), 0, symbol, params, {})
    return tmp_path


def written(folder, name):
    return [(folder / f"{name}-{part}").read_bytes() for part in PART]


@pytest.mark.slow
@pytest.mark.parametrize("linked", [False, True])
def test_a_process_killed_at_any_step_leaves_one_of_the_two_pairs(tmp_path, linked):
    output, places = tmp_path / "output", tmp_path / "places"
    output.mkdir()
    places.mkdir()
    tmp_path = tmp_path / "folder"
    tmp_path.mkdir()
    paths = [tmp_path / f"model-{part}" for part in PART]
    for path in paths if linked else ():
        path.symlink_to(places / path.name)
    for stage in range(12):
        for path in paths:
            path.write_text("old")
        code = f"""
            import os, signal
            from pathlib import Path
            from mxamp.convert import pairs
            steps = iter(range(100))
            def dies(function):
                def step(*args, **options):
                    if next(steps) == {stage}:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*args, **options)
                return step
            pairs.sync_to_disk = dies(pairs.sync_to_disk)
            Path.replace = dies(Path.replace)
            Path.rmdir = dies(Path.rmdir)
            paths = [Path(path) for path in {[str(path) for path in paths]!r}]
            with pairs.replaced_files(paths, print) as (folder, _):
                for path in paths:
                    (folder / path.name).write_text("new")
        """
        done = run_forked(textwrap.dedent(code), output)
        assert done.returncode == -signal.SIGKILL or stage > 8
        with pytest.raises(amp.ArgumentError):  # these are no models, but the pair is put right
            load_model(tmp_path / "model")
        found = {path.read_text() for path in paths}
        assert len(found) == 1, stage
    with replaced_files(paths, print) as (folder, _):
        for path in paths:
            (folder / path.name).write_text("last")
    assert {path.read_text() for path in paths} == {"last"}
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in paths)
    assert sorted(os.listdir(places)) == sorted(path.name for path in paths if linked)


@pytest.mark.parametrize("way", ["cut off", "no space"])
def test_what_can_not_be_written_leaves_the_old_files(saved, way, monkeypatch):
    amp.convert_files(saved / "model", saved / "low", target_dtype="bfloat16")
    before, save = written(saved, "low"), mx.model.save_checkpoint

    def fails(prefix, *rest, **options):
        if way == "no space":
            raise OSError(28, "No space left on device")
        save(prefix, *rest, **options)
        with open(f"{prefix}-0000.params", "r+b") as file:
            file.truncate(40)

    monkeypatch.setattr(mx.model, "save_checkpoint", fails)
    with pytest.raises(amp.WriteError, match="unchanged") as raised:
        amp.convert_files(saved / "model", saved / "low", target_dtype="bfloat16", force=True)
    assert "\n" not in str(raised.value)
    assert written(saved, "low") == before
    assert not [name for name in os.listdir(saved) if name.startswith(".")]


def cycle(data):
    data["nodes"][1]["inputs"] = [[3, 0, 0]]


def bad_index(data):
    data["nodes"][3]["inputs"][0] = [70, 0, 0]


def bad_head(data):
    data["heads"] = [[9, 0, 0]]


def no_name(data):
    del data["nodes"][0]["name"]


def no_nodes(data):
    data["nodes"] = 7


def negative(data):
    data["nodes"][3]["inputs"][0] = [-1, 0, 0]


@pytest.mark.parametrize("damage", [cycle, bad_index, bad_head, no_name, no_nodes, negative])
def test_damaged_symbols_are_refused_in_one_sentence(saved, damage):
    path = saved / "model-symbol.json"
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(amp.ArgumentError, match=r"model-symbol\.json") as raised:
        load_model(saved / "model")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content", [b"", b'{"nodes": [', b"[" * 100000, b"\xff\xfe\x00", b"[]", b"null"]
)
def test_what_is_no_symbol_is_refused_in_one_sentence(saved, content):
    (saved / "model-symbol.json").write_bytes(content)
    with pytest.raises(amp.ArgumentError, match=r"model-symbol\.json"):
        load_model(saved / "model")


def test_files_converted_again_keep_their_casts(saved):
    policy = amp.Policy.default("float16", device="gpu")
    options = {"policy": policy, "cast_optional_params": True}
    amp.convert_files(saved / "model", saved / "low", **options)
    amp.convert_files(saved / "low", saved / "again", **options)
    assert written(saved, "again") == written(saved, "low")


def test_what_does_not_fit_together_is_refused(saved, caplog):
    symbol, args, _ = load_model(saved / "model")
    extra = {**args, "other_weight": randn(2)}
    mx.model.save_checkpoint(str(saved / "more"), 0, symbol, extra, {})
    load_model(saved / "more")
    assert "1 that the symbol does not have (other_weight)" in caplog.text
    less = {"fc_bias": args["fc_bias"]}
    mx.model.save_checkpoint(str(saved / "less"), 0, symbol, less, {})
    with pytest.raises(amp.ArgumentError, match=r"1 missing \(fc_weight\), and 0 that"):
        load_model(saved / "less")


@pytest.mark.parametrize("tolerance", [0, -1, None, "much"])
def test_a_tolerance_is_a_number_above_0(saved, tolerance):
    with pytest.raises(amp.ArgumentError, match="tolerance` must be a number above 0"):
        amp.convert_files(saved / "model", saved / "low", tolerance=tolerance)


def test_larger_files_are_logged(saved, caplog):
    with caplog.at_level("INFO", "mxamp"):
        amp.convert_files(saved / "model", saved / "low", target_dtype="bfloat16")
    assert "larger than the model's" in caplog.text
    assert "cast_optional_params" in caplog.text


def test_converted_files_hold_what_was_converted(saved):
    done = amp.convert_files(saved / "model", saved / "low", target_dtype="bfloat16")
    symbol, args, _ = load_model(saved / "low")
    assert done.symbol.is_file()
    assert np.allclose(args["fc_weight"].asnumpy(), randn(4, 8).asnumpy())
    assert "amp_cast" in symbol.tojson(remove_amp_cast=False)

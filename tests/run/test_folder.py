import dataclasses
import inspect
import json
import os
import pathlib
import stat

import numpy as np
import pytest

from jaxfl._support import files
from jaxfl._support.checks import check_folder
from jaxfl.engine import chunk
from jaxfl.privacy import Poisson
from jaxfl.run import folder as folders

run_folder = inspect.unwrap(folders.run_folder)  # without the tests' own check of types


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_files_keep_the_umask(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        files.write_json(tmp_path / "a.json", {})
        files.write_arrays(tmp_path / "a.npz", {"a": np.zeros(1)})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}


def test_a_failed_write_leaves_the_old_file_alone(tmp_path):
    files.write_json(tmp_path / "a.json", 1)
    with pytest.raises(TypeError):
        files.write_json(tmp_path / "a.json", object())
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert json.loads((tmp_path / "a.json").read_text()) == 1


@dataclasses.dataclass(frozen=True)
class Config:
    noise: np.ndarray
    out: pathlib.Path = pathlib.Path("runs")


@pytest.mark.parametrize("size", [5, 1000, 1001, 100_000])
def test_configurations_that_differ_in_one_number_of_an_array_get_their_own_folders(size, tmp_path):
    noise = np.ones(size)
    other = noise.copy()
    other[size // 2] = np.nextafter(1, 2)
    folders = [
        run_folder(tmp_path, "m", Config(values), 0) for values in (noise, noise.copy(), other)
    ]
    assert folders[0] == folders[1] != folders[2]
    assert run_folder(tmp_path, "m", {"values": [noise]}, 0) != run_folder(
        tmp_path, "m", {"values": [other]}, 0
    )


def test_values_of_any_depth_are_kept_in_full(tmp_path):
    config = {"sampling": Poisson(0.3), "z": np.float32(0.5), "n": np.int64(3), "seed": 9}
    folder = run_folder(tmp_path, "m", config, np.int64(2))
    assert folder.name == "seed=2"
    assert json.loads((folder / "config.json").read_text()) == {
        "method": "m", "sampling": {"type": "Poisson", "rate": 0.3}, "z": 0.5, "n": 3, "seed": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"config must hold numbers.*got <function"):
        run_folder(tmp_path, "m", {"work": lambda: None}, 0)


@pytest.mark.parametrize("method", ["../x", "a/b", "/tmp/x", "..", "", "a\\b", "a\0", 3])
def test_methods_that_lead_elsewhere_are_refused(method, tmp_path):
    with pytest.raises(ValueError, match="method must be"):
        run_folder(tmp_path / "root", method, {}, 0)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("seed", ["../x", "1", 1.0, True, None])
def test_seeds_that_are_no_numbers_are_refused(seed, tmp_path):
    with pytest.raises(ValueError, match="seed must be"):
        run_folder(tmp_path / "root", "m", {}, seed)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"{}", b'{"chunk": "8"}', b'{"chunk": 0}', b'{"chunk": -8}',
                b'{"chunk": 1e9}', b'{"chunk": true}', b'{"chunk": null}', b"[" * 100_000],
)  # fmt: skip
def test_a_damaged_remembered_chunk_is_forgotten(content, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(chunk, "_REMEMBERED", {})
    (tmp_path / "chunk-a.json").write_bytes(content)
    assert chunk._recall_chunk("a") is None
    (tmp_path / "chunk-a.json").write_text('{"chunk": 8}')
    assert chunk._recall_chunk("a") == 8


def test_a_path_that_the_system_does_not_take_is_named():
    with pytest.raises(ValueError, match=r"folder must be the path of a folder, .*too long"):
        check_folder("folder", "a" * 300)

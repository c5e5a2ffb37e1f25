import os
import shutil

import jax
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, small_clients

from jaxfl import simulate
from jaxfl.engine.state_file import Store
from jaxfl.run.checkpoint import DamagedError

LIKE = {"a": jax.ShapeDtypeStruct((6,), np.uint8), "b": jax.ShapeDtypeStruct((6, 3), np.float64)}
"""Shapes of a row whose fields leave a gap."""


def filled(folder):
    store = Store(folder, LIKE, 6)
    store.start()
    store.write(
        np.arange(6), {"a": np.arange(6, dtype=np.uint8), "b": np.arange(18.0).reshape(6, 3)}
    )
    store.commit()
    return store


def test_every_bit_of_a_row_is_under_its_checksum(tmp_path):
    store = filled(tmp_path)
    store.write(np.array([2]), {"a": np.array([9], np.uint8), "b": np.ones((1, 3))})
    store.flush()
    path, size = tmp_path / "rows.bin", store.bytes_per_client
    content = path.read_bytes()
    assert len(content) == 2 * 6 * size
    again = Store(tmp_path, LIKE, 6)
    for byte in range(len(content)):
        path.write_bytes(bytes([*content[:byte], content[byte] ^ 16, *content[byte + 1 :]]))
        place, client = divmod(byte // size, 6)
        if place == (client == 2):
            with pytest.raises(
                DamagedError, match=f"of 1 clients, the first of which is client {client}"
            ):
                again.restore(**store.saved())
        else:  # nobody needs that one
            again.restore(**store.saved())
            assert again.read(np.array([2]))["a"] == 9


@pytest.mark.slow
@pytest.mark.parametrize("left", [b"", bytes(1000)])
def test_what_an_interrupted_start_left_is_no_obstacle(left, tmp_path):
    def run(**options):
        options |= {"rounds": 1, "states": "host", "progress": False}
        return simulate(jax.random.key(0), ALGORITHMS["local_only"](), small_clients(), **options)

    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "rows.bin").write_bytes(left)
    jax.tree.map(np.testing.assert_array_equal, run(folder=tmp_path)[:2], run()[:2])


def test_lost_rows_are_named(tmp_path):
    store = filled(tmp_path)
    (tmp_path / "rows.bin").write_bytes(b"")
    with pytest.raises(DamagedError, match=r"rows.bin does not have \d+ bytes"):
        store.restore(**store.saved())
    (tmp_path / "rows.bin").unlink()
    with pytest.raises(DamagedError, match=r"rows.bin is missing"):
        store.restore(**store.saved())
    assert not (tmp_path / "rows.bin").exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_rows_in_another_kind_of_file_are_damage_and_not_waited_for(kind, tmp_path):
    store, path = filled(tmp_path), tmp_path / "rows.bin"
    aside = path.rename(tmp_path / "aside")
    content = aside.read_bytes()
    if kind == "link":
        path.symlink_to(aside)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(DamagedError, match=r"rows\.bin"):
        Store(tmp_path, LIKE, 6).restore(**store.saved())
    assert aside.read_bytes() == content


@pytest.mark.parametrize("states", [(), {"empty": np.zeros((6, 0), np.float32)}])
def test_states_without_numbers_need_no_file(states, tmp_path):
    store = Store(tmp_path / "none", states, 6)
    store.start()
    store.write(np.arange(6), states)
    store.flush()
    store.commit()
    store.restore(**store.saved())
    assert jax.tree.structure(store.states()) == jax.tree.structure(states)
    assert not (tmp_path / "none" / "rows.bin").exists()


def test_only_a_file_that_is_replaced_counts_as_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 10))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    like = jax.ShapeDtypeStruct((100, 10), np.float32)
    (tmp_path / "rows.bin").write_bytes(bytes(10_000))
    Store(tmp_path, like, 100)
    with pytest.raises(ValueError, match="folder must have"):
        Store(None, like, 100)


def test_rows_on_disk_take_no_memory_before_they_are_made(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 1 << 62))
    like = jax.ShapeDtypeStruct((10**7, 10**4), np.float32)
    store = Store(None, like, 10**7)
    assert store.bytes_per_client == 40_000

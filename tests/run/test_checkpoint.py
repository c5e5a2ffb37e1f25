"""Damage to a folder, and two runs in one folder: results are the run's, or there are none."""

import errno
import hashlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, MODEL, small_clients

from jaxfl import simulate
from jaxfl.algorithms import local_only
from jaxfl.data import load
from jaxfl.engine.state_file import Store
from jaxfl.run import checkpoint
from jaxfl.run import lock as locking
from jaxfl.run.checkpoint import Checkpoints
from jaxfl.run.folder import check_names, clear
from jaxfl.run.lock import Lock
from jaxfl.run.recorder import EvaluationSchedule

KEY = jax.random.key(1)
FACTS, PLAN = {"method": "mine"}, EvaluationSchedule(3, [1, 3])
CLIENTS = 20
LIKE = {
    "head": jax.ShapeDtypeStruct((CLIENTS, 3), np.float32),
    "mask": jax.ShapeDtypeStruct((CLIENTS, 5), np.uint8),
}


def state_of(round_):
    """Return a state for a round: a server of random weights, and the round's number."""
    weights = np.random.default_rng(round_).normal(size=(30, 4)).astype(np.float32)
    return {"server": {"w": jax.numpy.asarray(weights)}, "round": np.array([round_])}


def rows_of(round_, ids):
    random = np.random.default_rng(round_)
    return {
        "head": random.normal(size=(len(ids), 3)).astype(np.float32),
        "mask": random.integers(0, 255, (len(ids), 5), np.uint8),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with checkpoints of rounds 2 and 3, and the state and rows in each."""
    folder, held = tmp_path_factory.mktemp("saved"), {}
    checkpoints, store = (
        Checkpoints(folder / "ckpt", FACTS, PLAN),
        Store(folder / "states", LIKE, CLIENTS),
    )
    store.start()
    for round_, ids in enumerate([range(CLIENTS), [1, 4], [4, 7]], 1):
        store.write(np.array(ids), rows_of(round_, ids))
        store.flush()
        checkpoints.save(round_, state_of(round_) | {"states": store.saved()}, PLAN)
        store.commit()
        held[round_] = state_of(round_), store.read(np.arange(CLIENTS))
    return folder, held


def restored(folder, facts=FACTS, plan=PLAN):
    """Return the round from which a folder resumes, its state, and all rows."""
    store, found = Store(folder / "states", LIKE, CLIENTS), []

    def take(round_, state, made):
        assert made == PLAN
        store.restore(**state.pop("states"))
        found.append((round_, state, store.read(np.arange(CLIENTS))))

    like = state_of(0) | {"states": store.saved()}
    rounds = Checkpoints(folder / "ckpt", facts, plan).restore(lambda made: like, take)
    assert rounds == found[-1][0]
    return found[-1]


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def damage(random, path):
    """Flip a bit of a file, cut its end, replace its content, or delete it."""
    content = bytearray(path.read_bytes())
    kind = random.choice(["flip", "cut", "lose", "garble"])
    if kind == "flip" and content:
        content[random.integers(len(content))] ^= 1 << random.integers(8)
    elif kind == "cut" and content:
        del content[random.integers(len(content)) :]
    elif kind == "garble":
        content = bytearray(random.bytes(len(content) + 1))
    else:
        path.unlink()
        return
    path.write_bytes(content)


def rows_are_whole(folder, rows):
    """Return whether each of these rows is in one of its two places."""
    path, row = (
        folder / "states" / "rows.bin",
        np.dtype([("head", np.float32, 3), ("mask", np.uint8, 5)], align=True),
    )
    wanted = np.zeros(CLIENTS, row)
    wanted["head"], wanted["mask"] = rows["head"], rows["mask"]
    found = path.read_bytes() if path.exists() else b""
    if len(found) != 2 * wanted.nbytes:
        return False
    places = np.frombuffer(found, np.uint8).reshape(2, CLIENTS, -1)
    return bool(
        np.all(np.any(np.all(places == wanted.view(np.uint8).reshape(CLIENTS, -1), axis=2), axis=0))
    )


def test_whole_checkpoints_are_read(saved, caplog):
    folder, held = saved
    assert sorted(path.name for path in (folder / "ckpt").iterdir()) == ["2", "3"]
    round_, state, rows = restored(folder)
    assert round_ == 3
    equal((state, rows), held[3])
    assert not caplog.records


@pytest.mark.parametrize("seed", range(60))
def test_no_damage_goes_unnoticed(seed, saved, tmp_path, caplog):
    folder, held = saved
    copy, random = tmp_path / "copy", np.random.default_rng(seed)
    shutil.copytree(folder, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    wrong = [files[i] for i in random.choice(len(files), 1 + seed % 2, replace=False)]
    if seed % 4 == 0:  # chance would seldom find the one file of rows
        wrong = [copy / "states" / "rows.bin"]
    for path in wrong:
        damage(random, path)
    whole = [
        round_
        for round_ in (3, 2)
        if not any(path.is_relative_to(copy / "ckpt" / str(round_)) for path in wrong)
    ]
    if copy / "states" / "rows.bin" in wrong:  # which may or may not be a row that counts
        whole = [round_ for round_ in whole if rows_are_whole(copy, held[round_][1])]
    if not whole:
        with pytest.raises(
            ValueError,
            match=r"checkpoints are damaged \(the.* of round 3.*resume='never'",
        ):
            restored(copy)
        return
    round_, state, rows = restored(copy)
    assert round_ == whole[0]
    equal((state, rows), held[round_])
    assert ("the checkpoint of round 3" in caplog.text) == (round_ == 2)


def test_a_damaged_manifest_is_not_taken_for_another_run(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    path = copy / "ckpt" / "3" / "manifest.json"
    content = path.read_bytes()
    for byte in range(0, len(content), 13):
        path.write_bytes(bytes([*content[:byte], content[byte] ^ 1, *content[byte + 1 :]]))
        assert restored(copy)[0] == 2


def test_rows_of_later_rounds_are_no_rows_of_this_checkpoint(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    store = Store(copy / "states", LIKE, CLIENTS)
    like = state_of(0) | {"states": store.saved()}
    checkpoints = Checkpoints(copy / "ckpt", FACTS, PLAN)
    checkpoints.restore(
        lambda made: like, lambda round_, state, made: store.restore(**state["states"])
    )
    store.write(np.array([7]), rows_of(4, [7]))  # where round 2 has it
    store.flush()
    assert restored(copy)[0] == 3
    (copy / "ckpt" / "3" / "manifest.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"round 3: manifest.json is damaged.*round 2: the states of 1 clients"
    ):
        restored(copy)


def test_what_was_damaged_is_replaced(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    (copy / "ckpt" / "3" / "manifest.json").unlink()
    (copy / "ckpt" / "unfinished").mkdir()  # by a kill
    checkpoints = Checkpoints(copy / "ckpt", FACTS, PLAN)
    like = state_of(0) | {"states": Store(None, LIKE, CLIENTS).saved()}
    assert checkpoints.restore(lambda made: like, lambda *_: None) == 2
    checkpoints.save(3, like, PLAN)
    assert Checkpoints(copy / "ckpt", FACTS, PLAN).restore(lambda made: like, lambda *_: None) == 3
    checkpoints.save(5, like, PLAN)
    assert sorted(path.name for path in (copy / "ckpt").iterdir()) == ["3", "5"]


def test_a_kill_in_a_save_leaves_the_one_before(saved, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    like = state_of(0) | {"states": Store(None, LIKE, CLIENTS).saved()}
    checkpoints = Checkpoints(copy / "ckpt", FACTS, PLAN)
    checkpoints.restore(lambda made: like, lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(4, like, PLAN)
    equal(restored(copy)[1:], saved[1][3])


def test_names_that_are_no_checkpoints_are_passed_over(saved, tmp_path, caplog):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    for name in ("\u0663", "07", "0", "9" * 200, "8x"):
        (copy / "ckpt" / name).mkdir()
    (copy / "ckpt" / "5").touch()
    (copy / "ckpt" / "6").symlink_to(copy / "ckpt" / "3")
    os.mkfifo(copy / "ckpt" / "7")
    assert restored(copy)[0] == 3
    assert not caplog.records


def test_many_empty_checkpoints_give_one_warning(saved, tmp_path, caplog):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    for round_ in range(4, 404):
        (copy / "ckpt" / str(round_)).mkdir()
    assert restored(copy)[0] == 3
    (record,) = caplog.records
    assert "of round 403: manifest.json is missing; " in record.getMessage()
    assert "; and 397 more). Resuming from round 3" in record.getMessage()
    shutil.rmtree(copy / "ckpt" / "2")
    shutil.rmtree(copy / "ckpt" / "3")
    with pytest.raises(
        ValueError, match=r"must hold an intact checkpoint.*; and 397 more"
    ) as found:
        restored(copy)
    assert len(str(found.value)) < 600


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
@pytest.mark.parametrize("name", ["manifest.json", "state/_METADATA"])
def test_files_of_other_kinds_are_damage_and_not_waited_for(kind, name, saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    path, aside = copy / "ckpt" / "3" / name, tmp_path / "aside"
    path.rename(aside)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(aside)
    assert restored(copy)[0] == 2


def test_what_is_in_the_way_of_a_checkpoint_stays_and_no_link_is_followed(saved, tmp_path):
    copy, theirs = tmp_path / "copy", tmp_path / "theirs"
    shutil.copytree(saved[0], copy)
    theirs.mkdir()
    (theirs / "thesis.tex").touch()
    (copy / "ckpt" / "unfinished").symlink_to(theirs)
    checkpoints = Checkpoints(copy / "ckpt", FACTS, PLAN)
    like = state_of(0) | {"states": Store(None, LIKE, CLIENTS).saved()}
    checkpoints.save(4, like, PLAN)
    assert (copy / "ckpt" / "unfinished").is_symlink()
    (copy / "ckpt" / "5").touch()
    (copy / "ckpt" / "6").symlink_to(theirs)
    (copy / "ckpt" / "7").mkdir()
    (copy / "ckpt" / "7" / "theirs").mkdir()
    for rounds in (5, 6, 7):
        with pytest.raises(
            ValueError, match=f"{rounds}' must be a checkpoint, got a .* that no run wrote"
        ):
            checkpoints.save(rounds, like, PLAN)
    assert (copy / "ckpt" / "6").is_symlink()
    assert (copy / "ckpt" / "7" / "theirs").is_dir()
    assert Checkpoints(copy / "ckpt", FACTS, PLAN).restore(lambda made: like, lambda *_: None) == 4
    assert (theirs / "thesis.tex").exists()


def test_starting_over_removes_files_of_a_run_and_no_others(saved, tmp_path):
    copy, theirs = tmp_path / "copy", tmp_path / "theirs"
    shutil.copytree(saved[0], copy)
    own = [
        copy / "noise.key",
        copy / "metrics.jsonl",
        copy / f"metrics.jsonl.{'0f' * 8}",
        copy / "0_mu=1e-05" / "curves.png",
    ]
    kept = [copy / "ckpt" / "notes.txt", copy / "states" / "notes.txt", copy / "metrics.jsonl.bak"]
    kept += [
        theirs / "metrics.jsonl",
        copy / "2024-results" / "metrics.jsonl",
        copy / "0_mu=1e-05" / "metrics.csv",
    ]
    for path in (*own, *kept):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (copy / "1_mu=1").symlink_to(theirs)
    (copy / "privacy.json").symlink_to(theirs / "metrics.jsonl")
    clear(copy, points=False)
    clear(copy, points=True)
    Checkpoints(copy / "ckpt", FACTS, PLAN).clear()
    assert [path for path in own if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []
    assert not (copy / "privacy.json").is_symlink()
    assert sorted(path.name for path in (copy / "ckpt").iterdir()) == ["notes.txt"]
    assert sorted(path.name for path in (copy / "states").iterdir()) == ["notes.txt"]


@pytest.mark.parametrize("name", ["ckpt", "states"])
def test_folders_that_lead_elsewhere_are_refused_before_anything_is_written(name, tmp_path):
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    folder.mkdir()
    theirs.mkdir()
    (folder / name).symlink_to(theirs)
    with pytest.raises(
        ValueError, match=rf"{name}' must be a folder, got a symbolic link\. Remove it, or choose"
    ):
        quiet(folder)
    assert [path.name for path in folder.iterdir()] == [name]
    (folder / name).unlink()
    (folder / "privacy.json").mkdir()
    with pytest.raises(
        ValueError, match=r"privacy\.json' must be a file, got a folder\. Remove it, or choose"
    ):
        quiet(folder)
    (folder / "privacy.json").rename(folder / "noise.key")
    with pytest.raises(ValueError, match=r"noise\.key' must be a file, got a folder"):
        check_names(folder, [folder])
    (folder / "1_mu=1").symlink_to(theirs)
    with pytest.raises(ValueError, match="1_mu=1' must be a folder, got a symbolic link"):
        check_names(folder, [folder / "0_mu=0", folder / "1_mu=1"])


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "privacy.json", "report.html"])
def test_a_report_that_no_run_wrote_is_left_alone(name, resume, tmp_path):
    theirs = tmp_path / name
    theirs.write_text("theirs")
    with pytest.raises(ValueError, match=rf"only if a run wrote them, got '\S+{name}' without"):
        quiet(tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert theirs.read_text() == "theirs"


def test_a_run_replaces_reports_of_a_run_that_has_no_checkpoint_yet(tmp_path):
    quiet(tmp_path)
    Checkpoints(tmp_path / "ckpt", FACTS, PLAN).clear()
    (tmp_path / "metrics.jsonl").write_text("")
    quiet(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text()


def test_a_shorter_run_is_told_how_to_read_the_longer_one(tmp_path):
    quiet(tmp_path, rounds=2)
    with pytest.raises(
        ValueError, match=r"rounds 2, not 1.* To read or resume it, give rounds=2\. For a new"
    ):
        quiet(tmp_path, rounds=1)


def test_another_run_is_not_taken_for_a_damaged_one(saved):
    with pytest.raises(
        ValueError, match=r"holds another run\. What differs: method mine, not yours\."
    ):
        restored(saved[0], {"method": "yours"})
    with pytest.raises(
        ValueError, match=r"What differs: rounds 3, not 2; evaluations \[1, 3\], not \[2\]"
    ):
        restored(saved[0], plan=EvaluationSchedule(2, [2]))


def test_the_same_run_of_more_rounds_goes_on(saved):
    equal(restored(saved[0], plan=EvaluationSchedule(5, [5]))[1:], saved[1][3])


def test_a_manifest_without_a_plan_is_of_an_older_version(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    path = copy / "ckpt" / "3" / "manifest.json"
    content = {
        name: part
        for name, part in json.loads(path.read_text()).items()
        if name in ("fingerprint", "files")
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest} | content))
    with pytest.raises(ValueError, match="older version of jaxfl"):
        restored(copy)


def test_facts_of_another_format_are_of_an_older_version(saved):
    with pytest.raises(ValueError, match="older version of jaxfl"):
        restored(saved[0], FACTS | {"format": 2})


def test_processes_of_other_programs_are_refused(saved, monkeypatch):
    def one_differs(*values):
        return [*values[:2], values[2] + 1, *values[3:]] if len(values) == 4 else [*values]

    monkeypatch.setattr("jaxfl.engine.processes.maximum", one_differs)
    with pytest.raises(ValueError, match="arguments or data that differ"):
        restored(saved[0])


def quiet(folder, name="local_only", **options):
    defaults: dict[str, Any] = {"rounds": 3, "eval_every": 1, "progress": False}
    return simulate(KEY, ALGORITHMS[name](), small_clients(), folder=folder, **defaults | options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return folder and result of a finished run of each store, with checkpoints of all rounds."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxfl.run.followers._CHECKPOINT_SECONDS", -1.0)
        for store in ("device", "host"):
            folder = tmp_path_factory.mktemp(store)
            found[store] = folder, quiet(folder, states=store)
    return found


def snapshot(folder):
    return {
        path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")
    } | {folder: folder.stat().st_mtime_ns}


@pytest.mark.parametrize("store", ["device", "host"])
def test_a_damaged_newest_checkpoint_changes_no_result(store, runs, tmp_path, caplog):
    folder, whole = runs[store]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    large = max(
        (path for path in (copy / "ckpt" / "3" / "state").rglob("*") if path.is_file()),
        key=lambda p: p.stat().st_size,
    )
    large.write_bytes(large.read_bytes()[:-1])
    caplog.set_level("INFO", "jaxfl")
    if store == "host":  # the end of the run has moved rows of round 2, to hand out its states
        with pytest.raises(
            ValueError, match=r"round 3: .* is damaged; the checkpoint of round 2: the states of"
        ):
            quiet(copy, states=store)
        return
    again = quiet(copy, states=store)
    assert "the checkpoint of round 3" in caplog.text
    assert f"round 2 of 3 read from {copy}/ckpt/2; resuming" in caplog.text
    assert again.restored == 2
    equal(again[:2], whole[:2])
    assert again.metrics == whole.metrics
    assert quiet(copy, states=store).restored == 3
    for path in (copy / "ckpt").rglob("manifest.json"):
        path.write_bytes(b"\xff{garbage")
    with pytest.raises(ValueError, match="must hold an intact checkpoint"):
        quiet(copy, states=store)
    fresh = quiet(copy, states=store, resume="never")
    assert fresh.restored == 0
    equal(fresh[:2], whole[:2])


@pytest.mark.parametrize("store", ["device", "host"])
def test_a_finished_run_is_read_where_nothing_can_be_written(store, runs, monkeypatch):
    folder, whole = runs[store]
    plain, before = os.access, snapshot(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and plain(path, mode))
    again = quiet(folder, states=store)
    assert again.restored == 3
    equal(again[:2], whole[:2])
    with pytest.raises(ValueError, match="folder that can be written"):
        quiet(folder, states=store, resume="never")
    assert snapshot(folder) == before


def test_what_is_read_is_told(runs, capsys, caplog):
    folder = runs["device"][0]
    caplog.set_level("INFO", "jaxfl")
    quiet(folder, progress=True)
    assert f"local_only: round 3 of 3 read from {folder}/ckpt/3; nothing is computed" in " ".join(
        capsys.readouterr().out.split()
    )
    quiet(folder)
    assert not capsys.readouterr().out
    assert "nothing is computed" in caplog.text


def test_never_replaces_another_run(runs, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(runs["host"][0], copy)
    (copy / "mine.txt").write_text("kept")
    result = quiet(copy, "fedavg", rounds=1, resume="never")
    assert result.restored == 0
    assert [
        json.loads(line)["round"] for line in (copy / "metrics.jsonl").read_text().splitlines()
    ] == [1]
    assert (copy / "mine.txt").exists()
    assert not (copy / "states").exists()
    assert quiet(copy, "fedavg", rounds=1).restored == 1


def test_a_folder_in_use_is_refused_and_its_user_named(runs, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(runs["device"][0], copy)
    lock = Lock(copy)
    lock.take(shared=False)
    before = snapshot(copy)
    for resume in ("auto", "never"):
        with pytest.raises(
            ValueError,
            match=rf"is in use by process {os.getpid()} on .*\. Wait for that process, end it, or",
        ):
            quiet(copy, resume=resume)
    assert snapshot(copy) == before
    lock.take(shared=True)
    assert quiet(copy).restored == 3  # both only read
    with pytest.raises(ValueError, match="is in use by another process"):
        quiet(copy, resume="never")
    lock.close()
    assert quiet(copy, resume="never").restored == 0


def test_an_error_releases_the_folder(tmp_path, runs):
    copy = tmp_path / "copy"
    shutil.copytree(runs["device"][0], copy)
    with pytest.raises(ValueError, match="another run") as kept:
        quiet(copy, "fedavg")
    lock = Lock(copy)
    lock.take(shared=False)
    lock.close()
    assert kept.value.__traceback__ is not None  # whose frames hold what the call held


def test_a_kill_releases_the_folder(tmp_path):
    script = (
        "import pathlib, sys, time; from jaxfl.run.lock import Lock\n"
        "lock = Lock(pathlib.Path(sys.argv[1])); lock.take(shared=False); print('locked', flush=True); time.sleep(600)"
    )
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        own = Lock(tmp_path)
        with pytest.raises(ValueError, match=f"process {process.pid} on "):
            own.take(shared=True)
        process.send_signal(signal.SIGKILL)
    own.take(shared=False)
    own.close()


@pytest.mark.parametrize(
    "kind", ["link", "dangling link", "fifo", "folder", "file", "hard link", "alike", "own"]
)
def test_a_lock_that_no_run_made_is_neither_written_nor_waited_for(kind, tmp_path):
    folder, target = tmp_path / "run", tmp_path / "target"
    folder.mkdir()
    path = folder / ".lock"
    if kind != "dangling link":
        target.write_text("theirs" if kind != "own" else "process 7 on their.host\n")
    if kind in ("link", "dangling link"):
        path.symlink_to(target)
    elif kind in ("hard link", "own"):
        path.hardlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("theirs" if kind == "file" else "process 7 on our list\nof theirs")
    lock = Lock(folder)
    before = snapshot(folder)
    lock.take(shared=True)
    lock.close()
    with pytest.raises(ValueError, match=r"\.lock.*Remove it, or choose another folder\."):
        lock.take(shared=False)
    assert snapshot(folder) == before
    assert kind == "dangling link" or "their" in target.read_text()
    assert target.exists() == (kind != "dangling link")


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_foreign_folders_among_checkpoints_stay(resume, tmp_path):
    foreign = [tmp_path / "ckpt" / name / "theirs" for name in ("unfinished", "unfinished-2")]
    for path in foreign:
        path.mkdir(parents=True)
    quiet(tmp_path, resume=resume)
    assert all(path.is_dir() for path in foreign)
    assert (tmp_path / "ckpt" / "3" / "manifest.json").exists()
    assert not (tmp_path / "ckpt" / "unfinished-3").exists()


def test_a_shared_lock_writes_nothing(tmp_path):
    lock = Lock(tmp_path)
    lock.take(shared=True)
    assert list(tmp_path.iterdir()) == []
    lock.take(shared=False)
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    lock.close()
    before = snapshot(tmp_path)
    lock.take(shared=True)
    lock.close()
    assert snapshot(tmp_path) == before


def test_a_full_disk_leaves_a_lock_that_locks(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    lock, other = Lock(tmp_path), Lock(tmp_path)
    lock.take(shared=False)
    with pytest.raises(ValueError, match="is in use by another process"):
        other.take(shared=True)
    lock.close()
    other.take(shared=False)
    other.close()


def test_systems_without_locks_go_without(tmp_path, monkeypatch, caplog):
    def refuse(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    Lock(tmp_path).take(shared=False)
    assert "cannot be locked (Operation not supported)" in caplog.text
    monkeypatch.setattr(locking, "fcntl", None)
    Lock(tmp_path).take(shared=False)


def test_a_checkpoint_under_the_name_of_another_round_is_not_used(saved, tmp_path, caplog):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    shutil.copytree(copy / "ckpt" / "3", copy / "ckpt" / "9")
    assert restored(copy)[0] == 3
    assert "the checkpoint of round 9: it was made after round 3" in caplog.text


@pytest.mark.parametrize("content", ["null", "[]", "3", "[" * 100_000, ""])
def test_a_manifest_of_another_kind_is_damaged(content, saved, tmp_path, caplog):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    (copy / "ckpt" / "3" / "manifest.json").write_text(content)
    assert restored(copy)[0] == 2
    assert "manifest.json is damaged" in caplog.text


@pytest.mark.parametrize("name", ["lr=[0.1]", "a\\b", "]"])
def test_a_folder_that_could_not_be_read_is_refused_before_the_first_round(name, tmp_path):
    with pytest.raises(
        ValueError, match=r"folder must have a path without \[ \] .*Choose another name"
    ):
        quiet(tmp_path / name / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "best", "states": "host"}, "keep must be 'last' with states='host'"),
        ({"central": load("digits")}, "central must be None for method='local_only'"),
    ],
)
def test_an_error_leaves_the_files_of_the_run_that_would_be_replaced(options, message, tmp_path):
    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    settings: Any = {"rounds": 1, "folder": tmp_path, "progress": False}
    method = local_only(MODEL)
    simulate(0, method, small_clients(), **settings)
    before = files()
    with pytest.raises(ValueError, match=message):
        simulate(0, method, small_clients(), resume="never", **settings | options)
    assert files() == before

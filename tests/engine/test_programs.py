import collections
import functools
import hashlib
import os
import pathlib
import secrets
import subprocess
import sys

import jax
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, small_clients
from jax import Array
from jaxtyping import Key

from jaxfl import simulate, sweep
from jaxfl.engine import chunk, compilation_cache
from jaxfl.types import Algorithm, Clients

PROGRAM = """
import jax
from collections import Counter

seen = Counter()
jax.monitoring.register_event_listener(lambda name, **_: seen.update([name.rsplit("/")[-1]]))
import jaxfl
jaxfl.configure()

print(jax.config.values["jax_compilation_cache_dir"], jax.config.values["jax_persistent_cache_min_compile_time_secs"])
"""
RUN = """
from algorithms_table import ALGORITHMS, small_clients

found = jaxfl.simulate(jax.random.key({seed}), ALGORITHMS["dp_fedavg"](), small_clients(), rounds=2, progress=False)
bits = b"".join(jax.device_get(leaf).tobytes() for leaf in jax.tree.leaves(found.server))
print(seen["cache_misses"], seen["cache_hits"], bits.hex())
"""


def run(code: str, before: str = "", **environment: str | None) -> list[list[str]]:
    """Return the words of each line that a new process prints, in which no cache is configured."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "JAXFL_"))
    }
    own = inherited | {key: value for key, value in environment.items() if value is not None}
    command = [sys.executable, "-W", "error", "-c", before + PROGRAM + code]
    tests = {"PYTHONPATH": os.pathsep.join([*sys.path, str(pathlib.Path(__file__).parents[1])])}
    done = subprocess.run(command, env=own | tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_second_process_compiles_nothing_whatever_the_seed(tmp_path):
    (_, cold), (_, warm), (_, off) = (
        run(RUN.format(seed=seed), JAXFL_CACHE_DIR=str(tmp_path), JAXFL_COMPILATION_CACHE=switch)
        for seed, switch in ((0, None), (1, None), (1, "0"))
    )
    assert int(cold[0]) > 0
    assert cold[1] == "0"
    assert warm[:2] == ["0", cold[0]]
    assert off[:2] == ["0", "0"]
    assert warm[2] == off[2] != cold[2]  # bit for bit, loaded or compiled
    folder = tmp_path / "programs"
    (processor,) = (path for path in folder.iterdir() if path.is_dir())
    assert len(list(processor.iterdir())) == int(cold[0])
    compilation_cache.trim(
        folder, 0
    )  # knows the names that JAX gives, in a folder that was marked before
    assert list(processor.iterdir()) == []


@pytest.mark.slow
def test_importing_writes_nothing_and_what_the_user_set_stands(tmp_path):
    folder, own = tmp_path / "cache", str(tmp_path / "own")
    ((found, least),) = run("", JAXFL_CACHE_DIR=str(folder))
    assert pathlib.Path(found).parent == folder / "programs"
    assert float(least) == 0
    assert not folder.exists()
    assert run("", JAXFL_CACHE_DIR=str(folder), JAX_COMPILATION_CACHE_DIR=own)[0] == [own, "1.0"]
    assert run("", JAXFL_CACHE_DIR=str(folder), JAXFL_COMPILATION_CACHE="0")[0] == ["None", "1.0"]


@pytest.fixture
def compiled():
    """Return a function that counts the programs compiled so far, which no cache had."""
    seen = collections.Counter()

    def listen(event: str, **_) -> None:
        seen.update([event.rsplit("/")[-1]])

    jax.monitoring.register_event_listener(listen)
    yield lambda: seen["compile_requests_use_cache"] - seen["cache_hits"]
    jax.monitoring.unregister_event_listener(listen)


def drawn_anew(clients: Clients) -> Clients:
    """Return clients of the same shapes with new random data, which no cache has seen."""
    rng = np.random.default_rng()
    return clients._replace(
        inputs=rng.permuted(clients.inputs), labels=rng.permutation(clients.labels)
    )


def run_method(method: str, key: Key[Array, ""], clients: Clients, **options) -> None:
    simulate(key, ALGORITHMS[method](), clients, rounds=2, progress=False, **options)


def run_sweep(key: Key[Array, ""], clients: Clients) -> None:
    def build(sgd: float) -> Algorithm:
        return ALGORITHMS["dp_fedavg"](sgd=sgd)

    sweep(key, build, {"sgd": [0.1, 0.2]}, clients, rounds=2, progress=False)


RUNS = {
    "adp_pfl_released": functools.partial(run_method, "adp_pfl_released"),
    "host store": functools.partial(run_method, "centaur", states="host"),
    "sweep": run_sweep,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adp_pfl_released", "host store", "sweep"])
def test_keys_and_data_are_arguments_of_all_programs(name, compiled):
    clients = small_clients()
    RUNS[name](jax.random.key(0), clients)
    before = compiled()
    RUNS[name](jax.random.key(secrets.randbits(31)), drawn_anew(clients))
    assert compiled() == before


def program(
    folder: pathlib.Path, name: str, *, age: int = 0, processor: str = "0123456789abcdef"
) -> pathlib.Path:
    """Write a cached program of 10 bytes, last used at 1e9 - `age` seconds, and return its path."""
    path = folder / processor / f"jit_{name}-{hashlib.sha256(name.encode()).hexdigest()}-cache"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(10))
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_the_folder_keeps_the_programs_that_were_used_last(tmp_path):
    folder = tmp_path / "programs"
    compilation_cache.claim(folder)
    new = program(folder, "new", processor="fedcba9876543210")
    middle = program(folder, "middle", age=1)
    old = program(folder, "old", age=2)
    compilation_cache.trim(folder, 30)
    assert all(path.exists() for path in (new, middle, old))
    compilation_cache.trim(folder, 29)
    assert [path.exists() for path in (new, middle, old)] == [True, True, False]
    compilation_cache.trim(folder, 0)
    assert not any(path.exists() for path in (new, middle, old))
    compilation_cache.trim(tmp_path / "absent", 0)


@pytest.mark.parametrize("where", ["folder", "above", "link to a marked folder"])
def test_a_folder_that_others_filled_is_neither_marked_nor_trimmed(where, tmp_path):
    folder = tmp_path / "programs"
    folder.mkdir()
    kept = program(folder, "own")
    if where == "above":
        kept = folder / "thesis.tex"
        kept.write_bytes(bytes(10))
    elif where == "link to a marked folder":
        kept.unlink()
        kept.parent.rmdir()
        compilation_cache.claim(folder)
        kept = program(folder, "own")
        folder = tmp_path / "link"
        folder.symlink_to(tmp_path / "programs")
    compilation_cache.claim(folder)
    compilation_cache.trim(folder, 0)
    assert kept.exists()


def test_only_files_that_jax_wrote_are_trimmed_and_no_link_is_followed(tmp_path):
    folder = tmp_path / "programs"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    compilation_cache.claim(folder)
    own = program(folder, "own")
    foreign = [
        program(theirs, "elsewhere"),
        program(folder, "of no processor", processor="weights"),
        folder / own.name,
        own.parent / "model-cache",
        own.parent / f"{own.name}.bak",
    ]
    for path in foreign[2:]:
        path.write_bytes(bytes(10))
    (folder / ("f" * 16)).symlink_to(foreign[0].parent)
    linked = own.parent / foreign[0].name
    linked.symlink_to(foreign[0])
    compilation_cache.trim(folder, 0)
    assert not own.exists()
    assert all(path.exists() for path in foreign)
    assert linked.is_symlink()


@pytest.mark.parametrize("named", ["~no_such_user/x", "/dev/null/x", "/proc/x"])
def test_choices_of_chunks_stay_in_memory_where_no_cache_can_be_had(named, monkeypatch):
    monkeypatch.setenv("JAXFL_CACHE_DIR", named)
    monkeypatch.setattr(chunk, "_REMEMBERED", {})
    chunk._remember_chunk("one", {"chunk": 3})
    assert chunk._recall_chunk("one") == 3
    assert chunk._recall_chunk("other") is None


def test_programs_compile_without_a_word_where_the_cache_cannot_be_made():
    code = 'print(jax.jit(lambda x: x + 1)(1.0), jax.config.values["jax_compilation_cache_dir"])'
    assert run(code, JAXFL_CACHE_DIR="/proc/x")[1] == ["2.0", "None"]


def test_a_user_without_a_home_imports_the_library():
    homeless = """
import os
import pwd


def getpwuid(uid):
    raise KeyError(uid)


pwd.getpwuid = getpwuid
os.environ.pop("HOME", None)
"""
    code = """
from jaxfl._support.files import cache_folder
try:
    cache_folder()
except OSError as error:
    print(error)
"""
    (cache, _), message = run(code, before=homeless)
    assert cache == "None"
    assert "Set JAXFL_CACHE_DIR" in " ".join(message)

import collections
import functools
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
from jaxfl.engine import compilation_cache
from jaxfl.types import Algorithm, Clients

PROGRAM = """
import jax
from collections import Counter

seen = Counter()
jax.monitoring.register_event_listener(lambda name, **_: seen.update([name.rsplit("/")[-1]]))
import jaxfl

print(jax.config.values["jax_compilation_cache_dir"], jax.config.values["jax_persistent_cache_min_compile_time_secs"])
"""
RUN = """
from algorithms_table import ALGORITHMS, small_clients

found = jaxfl.simulate(jax.random.key({seed}), ALGORITHMS["dp_fedavg"](), small_clients(), rounds=2, progress=False)
bits = b"".join(jax.device_get(leaf).tobytes() for leaf in jax.tree.leaves(found.server))
print(seen["cache_misses"], seen["cache_hits"], bits.hex())
"""


def run(code: str, **environment: str | None) -> list[list[str]]:
    """Words of the lines that a fresh process prints, where no cache is configured."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "JAXFL_"))}
    own = inherited | {key: value for key, value in environment.items() if value is not None}
    command = [sys.executable, "-W", "error", "-c", PROGRAM + code]
    tests = {"PYTHONPATH": os.pathsep.join([*sys.path, str(pathlib.Path(__file__).parent)])}
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
    """How many programs were compiled since: asked for, and not found."""
    seen = collections.Counter()

    def listen(event: str, **_) -> None:
        seen.update([event.rsplit("/")[-1]])

    jax.monitoring.register_event_listener(listen)
    yield lambda: seen["compile_requests_use_cache"] - seen["cache_hits"]
    jax.monitoring.unregister_event_listener(listen)


def drawn_anew(clients: Clients) -> Clients:
    """Clients of the same shapes with data that no test, of today or before, has had."""
    rng = np.random.default_rng()
    return clients._replace(inputs=rng.permuted(clients.inputs), labels=rng.permutation(clients.labels))


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


def test_the_folder_keeps_what_was_used_last(tmp_path):
    for age, name in enumerate(["a/new", "b/middle", "b/old"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10))
        os.utime(path, (1e9 - age, 1e9 - age))
    compilation_cache.trim(tmp_path, 30)
    assert len(list(tmp_path.glob("*/*"))) == 3
    compilation_cache.trim(tmp_path, 29)
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["middle", "new"]
    compilation_cache.trim(tmp_path, 0)
    assert not list(tmp_path.glob("*/*"))
    compilation_cache.trim(tmp_path / "absent", 0)

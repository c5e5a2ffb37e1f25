"""A folder belongs to one run. Runs differ if anything that decides a result differs."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import MODEL, small_clients

from jaxfl import simulate, sweep
from jaxfl.algorithms import fedavg, fedprox
from jaxfl.data import load, make_clients
from jaxfl.local.sam import sam
from jaxfl.local.train import LocalSGD
from jaxfl.models import mlp
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import FixedSize, Poisson
from jaxfl.run import fingerprint
from jaxfl.run.checkpoint import Checkpoints
from jaxfl.run.recorder import EvaluationSchedule
from jaxfl.types import Lists, Terms

KEY = jax.random.key(1)
UPDATE = "the clients' update"
CONSTANT = np.linspace(-1, 1, 1_000_000, dtype=np.float32)


def method(
    model=MODEL,
    rate=0.1,
    weight=0.5,
    server=1.0,
    clip=0.3,
    constant=CONSTANT,
    sampling=Poisson(0.6),
    radius=0.1,
    **steps,
):
    """Return a method with most settings that distinguish runs."""
    steps: dict[str, Any] = {"batch_size": 4, "epochs": 2} | steps

    def penalty(params, server):
        moved = sum(
            jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(server))
        )
        return weight * moved + 0 * jnp.take(constant, jnp.int32(moved))

    return fedavg(
        model,
        local=LocalSGD(optax.sgd(rate), **steps),
        penalty=penalty,
        server_optimizer=optax.sgd(server),
        mechanism=Mechanism(clip=clip, sampling=sampling),
        gradient=sam(radius),
    )


def run(folder, algorithm=None, clients=None, **options):
    defaults: dict[str, Any] = {"rounds": 2, "eval_every": 2, "progress": False}
    return simulate(
        KEY, algorithm or method(), clients or small_clients(), folder=folder, **defaults | options
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a run by another process, which orders its sets in another way."""
    path = tmp_path_factory.mktemp("run")
    paths = os.pathsep.join(map(str, pathlib.Path(__file__).parents[:3]))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "7"}
    script = "import sys, conftest, test_fingerprint; test_fingerprint.run(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(path)], env=environment, check=True)
    return path


def changed(name, index, value):
    """Return the small clients with another value at one place."""
    clients: Any = jax.tree.map(np.copy, small_clients())
    field = getattr(clients, name)
    array = field.flat if isinstance(field, Lists) else field
    assert array[index] != value
    array[index] = value
    return clients


def other_constant():
    constant = CONSTANT.copy()
    constant[654_321] += 1
    return constant


OTHERS: dict[str, Any] = {
    "learning rate": ({"algorithm": lambda: method(rate=5.0)}, UPDATE),
    "batch": ({"algorithm": lambda: method(batch_size=2)}, UPDATE),
    "epochs": ({"algorithm": lambda: method(epochs=1)}, UPDATE),
    "penalty": ({"algorithm": lambda: method(weight=0.4)}, UPDATE),
    "radius": ({"algorithm": lambda: method(radius=0.2)}, UPDATE),
    "constant": (
        {"algorithm": lambda: method(constant=other_constant())},
        "arrays that the method",
    ),
    "constant on the device": (
        {"algorithm": lambda: method(constant=jnp.asarray(other_constant()))},
        "arrays that the method",
    ),
    "server": ({"algorithm": lambda: method(server=0.9)}, "the server's update"),
    "width": (
        {"algorithm": lambda: method(mlp((8, 8, 1), 10, hidden=(17,)))},
        "the start.*; the clients' update",
    ),
    "personalize": (
        {
            "algorithm": lambda: method()._replace(
                personalize=lambda key, server, client, data: optax.tree.scale(2, server.params)
            )
        },
        "personalize",
    ),
    "clip": ({"algorithm": lambda: method(clip=0.5)}, r"mechanism\.clip 0\.3, not 0\.5"),
    "cohort": (
        {"algorithm": lambda: method(sampling=Poisson(0.5))},
        r"mechanism\.sampling\.rate 0\.6, not 0\.5",
    ),
    "pixel": ({"clients": lambda: changed("inputs", (3, 1, 1, 0), 77)}, "What differs: inputs"),
    "label": ({"clients": lambda: changed("labels", 3, 9)}, "What differs: labels"),
    "partition": ({"clients": lambda: changed("train", 0, 1700)}, "What differs: the partition"),
    "size": ({"clients": lambda: changed("train_size", 0, 8)}, "numbers of training examples"),
    "tests": ({"clients": lambda: changed("test", 0, 1700)}, "rows of test examples"),
    "evaluations": ({"eval_every": lambda: 1}, r"evaluations \[2\], not \[1, 2\]"),
    "rounds": ({"rounds": lambda: 1}, "rounds 2, not 1"),
    "devices": ({"devices": lambda: jax.devices()[:1]}, "devices 2, not 1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused_and_what_differs_is_named(name, folder):
    options, named = OTHERS[name]
    before = {
        path: path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    ways = {"devices": "To resume it", "rounds": "To read or resume it, give rounds=2"}
    remedy = ways.get(name, "resume='never'")
    with pytest.raises(ValueError, match=f"holds another run.*{named}.*{remedy}"):
        run(folder, **{option: make() for option, make in options.items()})
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"chunk": 2}, {"chunk": "auto"}, {"progress": True}])
def test_the_same_run_is_read_whatever_its_speed(options, folder, monkeypatch):
    monkeypatch.setattr("jaxfl.run.loop.Loop._evaluate", None)  # nothing is computed
    assert run(folder, **options).restored == 2


def test_what_is_in_another_function_changes_no_other_hash(folder):
    (manifest,) = folder.glob("ckpt/2/manifest.json")
    facts = json.loads(manifest.read_text())["fingerprint"]
    others = {"round": None, "clients.labels": None, "jax": "0.1"}
    assert fingerprint.differences(facts, facts | others) == [
        f"jax {jax.__version__}, not 0.1",
        "labels",
    ]
    assert fingerprint.differences(facts, facts | {"round": None}) == [
        "the engine's round (sampling, clipping, noise)"
    ]


def test_a_folder_holds_codes_and_no_prose(folder):
    """The words of messages may change. A folder still belongs to the same run then."""
    (manifest,) = folder.glob("ckpt/2/manifest.json")
    facts = json.loads(manifest.read_text())["fingerprint"]
    assert all(re.fullmatch(r"[a-z0-9_.]+", name) for name in facts)
    parts = {"init", "client_update", "server_update"}
    arrays = {f"clients.{name}" for name in ("inputs", "labels", "train", "train_size", "test")}
    assert {*parts, "constants", "round", "evaluation", *arrays, "clients.test_size"} <= set(facts)
    assert {"key", "noise_key", "paired_noise"} <= set(facts)
    assert {"mechanism", "mechanism.clip", "mechanism.sampling.rate"} <= set(facts)


def test_reworded_terms_are_the_same_run():
    terms = Terms(1e-6, (2.0, "the rule of the paper"), "its masks are not hidden")
    facts = fingerprint.of_terms("terms", terms)
    reworded = terms._replace(claim=(2.0, "the paper's rule"), broken="no noise hides its masks")
    assert fingerprint.of_terms("terms", reworded) == facts
    for other in (
        terms._replace(delta=1e-5),
        terms._replace(claim=(3.0, "the rule of the paper")),
        terms._replace(broken=None),
    ):
        assert fingerprint.of_terms("terms", other) != facts


@pytest.mark.parametrize(
    ("stored", "device", "remedy"),
    [
        (8, "cpu", "set JAX_NUM_CPU_DEVICES=8 before Python starts"),
        (
            1,
            "cpu",
            r"set JAX_NUM_CPU_DEVICES=1 before Python starts or give devices=jax.devices\(\)\[:1\]",
        ),
        (1, "NVIDIA H100", r"give devices=jax.devices\(\)\[:1\]"),
        (8, "NVIDIA H100", "run it on 8 devices"),
    ],
)
def test_another_number_of_devices_is_refused_with_the_remedy_that_keeps_the_run(
    stored, device, remedy, tmp_path
):
    plan, facts = (
        EvaluationSchedule(1, [1]),
        {"method": "mine", "device": device, "devices": stored},
    )
    Checkpoints(tmp_path / "ckpt", facts, plan).save(1, {"weights": jnp.zeros(3)}, plan)
    other = Checkpoints(tmp_path / "ckpt", facts | {"devices": 2}, plan)
    with pytest.raises(
        ValueError, match=rf"devices {stored}, not 2\. To resume it, {remedy}\. For a new run"
    ) as found:
        other.restore(lambda made: {"weights": jnp.zeros(3)}, lambda *_: None)
    assert "delete" not in str(found.value)
    other = Checkpoints(tmp_path / "ckpt", facts | {"devices": 2, "method": "yours"}, plan)
    with pytest.raises(ValueError, match=r"method mine, not yours; devices .*resume='never'"):
        other.restore(lambda made: {"weights": jnp.zeros(3)}, lambda *_: None)


@pytest.mark.slow
def test_one_entry_of_a_long_array_of_noise_is_seen(tmp_path):
    digits = load("digits")
    clients = make_clients(digits, [[i] for i in range(1200)], [[i % 300] for i in range(1200)])

    def private(noise):
        steps = DPSGD(clip=1.0, noise_multiplier=noise, rate=0.5, steps=1)
        return fedavg(MODEL, local=steps, mechanism=Mechanism(clip=1.0, sampling=FixedSize(2)))

    noise = np.full(1200, 50.0)
    run(tmp_path, private(noise), clients)
    noise[500] = 0.05
    with pytest.raises(ValueError, match=r"What differs: dp_sgd\.noise_multiplier\."):
        run(tmp_path, private(noise), clients)


def test_versions_are_named(folder, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    with pytest.raises(ValueError, match=f"jax {jax.__version__}, not 9.9"):
        run(folder)
    monkeypatch.undo()
    with jax.threefry_partitionable(
        False
    ):  # a run has its own flag, so that its random numbers are the same
        run(folder)


def test_a_folder_of_an_older_version_is_refused(tmp_path):
    (tmp_path / "ckpt" / "1" / "fingerprint").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"of an older version of jaxfl.*resume='never'"):
        run(tmp_path)


@pytest.mark.slow
def test_points_of_a_sweep_are_told_apart(tmp_path):
    def points(mu, rate=0.05):
        build = functools.partial(fedprox, MODEL, local=LocalSGD(optax.sgd(rate), batch_size=4))
        return sweep(
            KEY, build, {"mu": mu}, small_clients(), rounds=1, folder=tmp_path, progress=False
        )

    with pytest.raises(ValueError, match=r"values must be columns .* got '\.\./x'"):
        sweep(KEY, fedprox, {"../x": [0.0]}, small_clients(), rounds=1, folder=tmp_path / "a")
    assert not any(tmp_path.iterdir())
    first = points([0.0, 1.0])
    assert [result.restored for result in first] == [0, 0]
    assert [result.restored for result in points([0.0, 1.0])] == [1, 1]
    with pytest.raises(ValueError, match=r"values of mu \[0.0, 1.0\], not \[0.0, 0.5\]"):
        points([0.0, 0.5])
    with pytest.raises(ValueError, match=UPDATE):
        points([0.0, 1.0], rate=0.2)
    build = functools.partial(fedprox, MODEL, local=LocalSGD(optax.sgd(0.05), batch_size=4))
    again = sweep(
        KEY, build, {"mu": [0.0, 1.0]}, small_clients(), rounds=1, batch=2, folder=tmp_path, progress=False
    )  # fmt: skip
    assert again[0].restored == 1  # how many points are vectorised is speed


def traced(work, *arguments):
    return fingerprint.of_programs({"round": [jax.make_jaxpr(work)(*arguments)]})


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("size", [3, 1001, 1_000_000])
def test_every_constant_counts(kind, size):
    def hashes(last):
        constant = np.ones(size, np.float32)
        constant[-1] = last

        def plain(x):
            return x * jnp.sum(kind(constant) * x)

        def within(x):
            return jax.lax.fori_loop(0, 3, lambda i, y: jax.jit(plain)(y), x)

        return [traced(work, 1.0) for work in (plain, within)]

    assert hashes(1) == hashes(1)  # of other functions, at other addresses
    assert all(a != b for a, b in zip(hashes(1), hashes(2)))


def test_a_long_list_is_named_by_its_ends():
    found = fingerprint.differences({"rounds": list(range(2, 41, 2))}, {"rounds": [2]})
    assert found[0].endswith("[2, 4, 6, ..., 40], not [2]")


def test_programs_differ_by_what_they_compute_alone():
    def one(x, y):
        return jnp.sin(x) * y + 2.0

    def other(first, second):
        return jnp.sin(first) * second + 2.0

    assert traced(one, 1.0, 2.0) == traced(other, 1.0, 2.0)
    wrong = [lambda a, b: one(b, a), lambda a, b: one(a, b) * 1, lambda a, b: jnp.cos(a) * b + 2.0]
    wrong += [lambda a, b: jnp.sin(a) * b + np.nextafter(np.float32(2), np.float32(3))]
    assert all(traced(work, 1.0, 2.0) != traced(one, 1.0, 2.0) for work in wrong)
    assert traced(one, 1.0, np.float16(2)) != traced(one, 1.0, 2.0)


def test_callbacks_and_custom_rules_have_no_address():
    def made():
        def work(x):
            return jax.pure_callback(
                lambda y: y + 1, jax.ShapeDtypeStruct((), np.float32), jax.nn.relu(x)
            )

        return work

    kept = [made() for _ in range(3)]
    assert traced(kept[0], 1.0) == traced(kept[1], 1.0) == traced(kept[2], 1.0)

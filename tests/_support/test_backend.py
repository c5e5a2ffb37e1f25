import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxfl
from jaxfl._support.backend import (
    _TRACED_FOR,
    backend,
    compiler_options,
    traced_for,
    visible_gpus,
    with_flags,
)
from jaxfl.models import resnet20


def test_only_the_backend_names_platforms():
    folder = pathlib.Path(jaxfl.__file__).parent
    naming = re.compile(r"default_backend|\.platform\b|[\"'](cpu|gpu|tpu|cuda)[\"']|xla_cpu")
    found = {path.name for path in folder.rglob("*.py") if naming.search(path.read_text())}
    # `configure` asks for a CPU's devices before JAX has started.
    assert found == {"backend.py", "flags.py"}


def test_each_platform_has_its_formulation():
    assert backend() == backend("cpu")
    assert backend("cpu").chunk == 1
    assert (backend("gpu").chunk, backend("tpu").chunk) == (512, "auto")
    assert not backend("gpu").compiler
    assert {name: tuple(backend(name).forms.values()) for name in ("cpu", "gpu", "tpu")} == {
        "cpu": ("winograd", "winograd", "winograd"),
        "gpu": ("im2col", "pallas", "grouped"),
        "tpu": ("blocks", "blocks", "blocks"),
    }


def test_flags_are_added_to_those_that_are_set():
    flags = os.environ["XLA_FLAGS"].split()
    assert flags.count(with_flags("").strip()) == 1
    assert with_flags(with_flags("--a=b")) == with_flags("--a=b") != "--a=b"
    assert "--xla_backend_optimization_level=0" in flags  # of the suite


def fresh(code, **variables):
    """Run code in a process whose JAX nobody has configured, and return what the process prints."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))
    }
    paths = [*sys.path, str(pathlib.Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"PYTHONPATH": os.pathsep.join(paths)} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\n"), done.stderr


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, 3),
        ({"JAX_NUM_CPU_DEVICES": "5"}, 5),
    ],
)
def test_a_number_of_cpu_devices_that_is_set_stays(variables, devices):
    code = "import jax, jaxfl; jaxfl.configure(); print(jax.device_count())"
    (told, *_), _ = fresh(code, **variables)
    assert int(told) == devices


def test_gpus_are_counted_before_the_backend_starts(monkeypatch):
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "cuda,cpu")
    for seen, number in (
        ("0,1", 2),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0,-1,1", 1),
        ("GPU-8a, GPU-9b,MIG-1", 3),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        assert visible_gpus() == number
    jax.config.update("jax_platforms", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert visible_gpus() == 0
    jax.config.update("jax_platforms", before)


def test_cores_that_are_devices_run_no_threads_within_an_operation():
    one, two = (Mesh(np.array(jax.devices()[:n]), ("clients",)) for n in (1, 2))
    assert "xla_cpu_multi_thread_eigen" not in compiler_options(one)
    assert compiler_options(two)["xla_cpu_multi_thread_eigen"] is False
    assert compiler_options(one).items() <= compiler_options(two).items()


def test_a_model_takes_the_form_of_the_devices_that_it_is_traced_for():
    model, x = resnet20((8, 8, 3)), jnp.zeros((2, 8, 8, 3), jnp.uint8)

    @jax.jit
    def outputs(params):
        return model.apply(params, model.prepare(x))

    def convolutions():
        return "conv_general_dilated" in str(
            outputs.trace(jax.eval_shape(model.init, jax.random.key(0))).jaxpr
        )

    assert not convolutions()
    assert model.largest_part == backend("cpu").microbatch
    with _TRACED_FOR("tpu"), traced_for(Mesh(np.array(jax.devices()[:1]), ("clients",))):
        assert not convolutions()
    with _TRACED_FOR("tpu"):
        assert backend() == backend("tpu")
        assert model.largest_part is None
        assert convolutions()
    assert not convolutions()


def test_importing_changes_nothing_in_the_process():
    code = (
        "import os, jax; before = (dict(os.environ), dict(jax.config.values)); import jaxfl; "
        "print(before == (dict(os.environ), dict(jax.config.values)))"
    )
    assert fresh(code)[0][0] == "True"


@pytest.mark.slow
def test_a_run_says_once_what_configuring_would_gain():
    run = (
        "import jaxfl.run.flags; jaxfl.run.flags.cores = lambda: 3\n"
        "from jaxfl import simulate\n"
        "from algorithms_table import ALGORITHMS, small_clients\n"
        "options = {'rounds': 1, 'progress': False}\n"
        "for seed in (0, 1): simulate(seed, ALGORITHMS['dp_fedavg'](), small_clients(), **options)\n"
    )
    _, shown = fresh(run)
    assert shown.count("This run uses one device for 3 cores") == 1
    _, silent = fresh(run, JAX_NUM_CPU_DEVICES="1")
    assert "one device" not in silent


@pytest.mark.slow
def test_configuring_comes_before_jax_starts():
    code = "import jax, jaxfl; jaxfl.configure(); jaxfl.configure(); print(jax.device_count())"
    (devices, *_), shown = fresh(code)
    assert int(devices) == backend("cpu").devices
    assert not shown
    late = "import jax, jaxfl; jax.devices(); jaxfl.configure()"
    assert "because JAX has started already" in fresh(late)[1]

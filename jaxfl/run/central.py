"""Scores of the global model on a test set that the server has."""

from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl.data.load import Dataset
from jaxfl.engine.evaluate import PerClient, compile_evaluation
from jaxfl.engine.memo import described, first_made, key_of_method
from jaxfl.engine.mesh import everywhere
from jaxfl.engine.program import Points
from jaxfl.engine.resident import cached_program
from jaxfl.engine.states import States
from jaxfl.run import fingerprint
from jaxfl.run.check import check_clients, check_examples
from jaxfl.run.trained import on_one_device, shared_params
from jaxfl.types import Algorithm, ClientData, Clients, Lists, Params, Tree


def central_client(name: str, data: Dataset) -> Clients:
    """Return one client that has a dataset's test examples, and trains on none.

    Args:
        name: Name of the argument that has the dataset, for errors.
        data: The dataset.

    Raises:
        ValueError: The dataset has no test examples, or arrays that do not fit together.
    """
    num_examples = len(data.test_labels)
    if not num_examples:
        raise ValueError(
            f"{name} must have test examples, got {data.name!r} without any. Give a dataset whose "
            "test_inputs and test_labels are to be scored."
        )
    client = Clients(
        inputs=data.test_inputs,
        labels=data.test_labels,
        # An array has at least one row, which this client of size 0 does not use.
        train=Lists.of([[0]]),
        train_size=np.zeros(1, np.int32),
        test=Lists.of([np.arange(num_examples)]),
        test_size=np.array([num_examples], np.int32),
    )
    return check_clients(name, client)


def by_global_model(algorithm: Algorithm, needed: str) -> Algorithm:
    """Return a method that evaluates all clients with the global model.

    Its `personalize` raises a ValueError if the method has no global model.

    Args:
        algorithm: The method.
        needed: Beginning of the error's message.
    """

    def personalize(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> Params:
        return shared_params(algorithm, server, needed)

    # An evaluation calls `personalize` alone, so the other functions stay as they are.
    return algorithm._replace(personalize=personalize)


def scored_by_global_model(method: Algorithm | Points, needed: str) -> Algorithm | Points:
    """Return a method, or points of one, that evaluates all clients with the global model.

    Args:
        method: One algorithm, or the points of a sweep.
        needed: Beginning of the error's message if the method has no global model.
    """
    if isinstance(method, Points):
        build = method.build
        return method._replace(build=lambda **values: by_global_model(build(**values), needed))
    return by_global_model(method, needed)


class Central:
    """A central test set on one device, and the program that scores the global model on it.

    Args:
        method: One algorithm, or the points of a sweep.
        first: The algorithm, or that of the first point.
        data: The dataset whose test examples are scored.
        devices: The run's devices, of which the first of this process is used. None stands for all
            devices.

    Raises:
        ValueError: The method has no global model, its network does not fit the examples, or the
            dataset has no test examples.
    """

    def __init__(
        self,
        method: Algorithm | Points,
        first: Algorithm,
        data: Dataset,
        devices: list[jax.Device] | None,
    ) -> None:
        needed = "central must be None for"
        self.client = central_client("central", data)
        # This call is only for its error, because the state that it gets has shapes alone.
        shared_params(first, check_examples("central", first, self.client), needed)
        scored_method: Any = scored_by_global_model(method, needed)
        scored = first_made(scored_method)
        self.population = on_one_device(scored, self.client, devices)
        # The cache keeps the program beyond the run, so the program must not hold the run's arrays.
        bare = described(self.population)
        self._program = cached_program(
            ("central", key_of_method(scored), bare),
            lambda chunk: compile_evaluation(scored, bare, chunk=chunk),
            self.population,
        )

    def evaluate(self, key: Key[Array, "*P"], server: Tree) -> PerClient:
        """Return the test loss and metrics of the global model by name, as arrays `[*P]`.

        Args:
            key: Any key, or one for each point. The program draws nothing.
            server: State of the server, which may lie on other devices.
        """
        # The run may use several devices, and the server's state lies on all of them.
        here = everywhere(self.population.mesh, jax.device_get(server))
        # The global model needs no client's state, so the states have no leaves.
        no_states = States.of(())
        evaluation = self._program(1)
        found = jax.device_get(evaluation(key, here, no_states))
        # The last axis counts clients, of which there is one. Points have an axis before it.
        return jax.tree.map(lambda leaf: leaf[..., 0], found)

    def facts(self) -> fingerprint.Facts:
        """Return hashes of the test set's inputs and labels (see `jaxfl.run.fingerprint`)."""
        arrays = {"inputs": self.client.inputs, "labels": self.client.labels}
        return fingerprint.of_arrays("central", arrays)

"""Trained models, which map inputs to outputs and to predictions."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Shaped

from jaxfl._support.checks import check_array
from jaxfl.data.load import check_inputs
from jaxfl.models.frozen import given
from jaxfl.models.tables import check_table_rows
from jaxfl.types import Model, Params, Tree

_BATCH = 256
"""Number of examples in one call of the compiled network, with padding."""


# Comparing arrays gives arrays, so models are equal only to themselves.
@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """Network with its trained weights. `model(inputs)` returns the outputs.

    Args:
        model: The network and its task.
        params: Trained weights of the network.
        frozen: Frozen weights, which no client trained (see `jaxfl.models.frozen`). None stands for
            those of `model`.
        about: Description of the model as JSON values. `method` and `clients` describe the run, and
            `round` is the number of rounds that trained the model. `keep` is "best" if test scores
            chose this round. `client` is None for the global model, and otherwise the number of the
            client whose model this is. `privacy` says which epsilon covers the weights. `statement`
            is the run's privacy statement, or None if it does not cover them. `inputs` is the dtype
            of the run's examples. `versions` has the versions of the packages that affect results.

    >>> from jaxfl import simulate
    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.data import iid, load, make_clients
    >>> from jaxfl.models import mlp
    >>> digits = load("digits")
    >>> rows = iid(digits.train_labels, 20, seed=0)
    >>> clients = make_clients(digits, rows, [[]] * 20)
    >>> method = fedavg(mlp((8, 8, 1), 10, hidden=(16,)))
    >>> model = simulate(0, method, clients, rounds=1, progress=False).model()
    >>> model(digits.test_inputs).shape, model.predict(digits.test_inputs).shape
    ((359, 10), (359,))
    """

    model: Model
    params: Params
    frozen: Tree = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.frozen is None:
            object.__setattr__(self, "frozen", self.model.frozen)

    def __call__(self, inputs: Shaped[Array | np.ndarray, "B ..."]) -> Shaped[np.ndarray, "B ..."]:
        """Return the outputs of examples, such as logits [B, K].

        Args:
            inputs: Examples as a run stores them, for instance pictures as bytes. Any number is
                computed in batches of 256.

        Raises:
            ValueError: The examples do not have the shape of the network's inputs, are not finite,
                or lie outside the table that the network looks them up in. Or the run had bytes,
                which the network scales, and the examples are no bytes, or the other way round.
        """
        return self._in_batches(self._outputs, inputs)

    def predict(self, inputs: Shaped[Array | np.ndarray, "B ..."]) -> Shaped[np.ndarray, "B ..."]:
        """Return the task's predictions for examples (see `Task.predict`).

        A classification gives classes [B], and a multi-label task true labels as a mask [B, K]. A
        regression gives numbers, and `next_token` a token for each position [B, L].

        Args:
            inputs: Examples, as in a call of the model.

        Raises:
            ValueError: As in a call of the model.
        """
        return self._in_batches(self._predictions, inputs)

    def apply(self, params: Params, inputs: Shaped[Array, "B ..."]) -> Array:
        """Return the outputs of examples by any weights of the network.

        JAX can transform this function, for instance by `jax.grad`.

        Args:
            params: Weights of the same structure as the model's own `params`.
            inputs: Examples, as in a call of the model, all in one batch.
        """
        return self._forward(params, self.frozen, inputs)

    def _forward(self, params: Params, frozen: Tree, inputs: Array) -> Array:
        """Return the outputs of one batch by any weights and any frozen weights."""
        with given(self.model.frozen, frozen):
            return self.model.apply(params, self.model.prepare(inputs))

    # A cached property writes into `__dict__`, which a frozen dataclass does not prevent.
    @functools.cached_property
    def _outputs(self) -> Callable[[Params, Tree, Array], Array]:
        """Compiled function of weights, frozen weights and a batch that returns outputs."""
        return jax.jit(self._forward)

    @functools.cached_property
    def _predictions(self) -> Callable[[Params, Tree, Array], Array]:
        """Compiled function of weights, frozen weights and a batch that returns predictions."""
        outputs = self._outputs
        predict = self.model.task.predict
        return jax.jit(lambda params, frozen, inputs: predict(outputs(params, frozen, inputs)))

    def _in_batches(
        self, program: Callable[[Params, Tree, Array], Array], inputs: Any
    ) -> np.ndarray:
        """Return the results of a program for all inputs, which it gets in batches of one size."""
        examples = self._checked_inputs(inputs)
        # No examples are one batch of padding, which has the shape of the results.
        starts = range(0, max(1, len(examples)), _BATCH)
        parts = [examples[start : start + _BATCH] for start in starts]
        # Results do not depend on the caller's flags, as in a run.
        with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
            results = [self._of_part(program, part) for part in parts]
        return np.concatenate(results)

    def _of_part(self, program: Callable[[Params, Tree, Array], Array], part: np.ndarray) -> Any:
        """Return the results of a part of at most one batch, which is padded with zeros."""
        # A last part of another size would make JAX compile the program again.
        padded = np.zeros((_BATCH, *part.shape[1:]), part.dtype)
        padded[: len(part)] = part
        found = program(self.params, self.frozen, jnp.asarray(padded))
        return np.asarray(found)[: len(part)]

    def _checked_inputs(self, inputs: Any) -> np.ndarray:
        """Return examples as an array, or raise a ValueError if the network does not take them."""
        given = check_array("inputs", inputs)
        _check_input_shape(self.model.input_shape, given.shape)
        self._check_bytes(given)
        examples = check_inputs("inputs", given)
        check_table_rows("inputs", self.model, examples)
        return examples

    def _check_bytes(self, given: np.ndarray) -> None:
        """Require bytes if the run had bytes that the network scales, and otherwise other numbers.

        Other numbers are not scaled, so that the network would get numbers of another range.
        """
        stored = self.about.get("inputs")
        if stored is None or (stored == "uint8") == (given.dtype == np.uint8):
            return
        as_bytes = jax.ShapeDtypeStruct(given.shape, np.uint8)
        prepared = jax.eval_shape(self.model.prepare, as_bytes)
        # A network that takes bytes as tokens turns them into whole numbers, without a scale.
        if jnp.issubdtype(prepared.dtype, jnp.floating):
            raise ValueError(
                f"inputs must be {stored}, as the examples of the run, got {given.dtype}. Give "
                "examples as the run had them, because only bytes are scaled to [-1, 1]."
            )


def _check_input_shape(wanted: tuple[int, ...] | None, shape: tuple[int, ...]) -> None:
    """Require a batch whose examples have the wanted shape. None accepts any shape.

    Args:
        wanted: Shape of one example, or None.
        shape: Shape of the batch.
    """
    if wanted is not None and shape[1:] != wanted:
        sizes = ", ".join(map(str, wanted))
        remedy = f"inputs.reshape(-1, {sizes})"
        if shape == wanted:
            remedy = "inputs[None]"
        raise ValueError(
            f"inputs must be examples [B, {sizes}], got shape {shape}. Give a batch, for instance "
            f"{remedy}."
        )

"""Files of trained models: safetensors, with a JSON text that says what the model is.

A file holds numbers and text only, so that loading one runs no code of its writer. The text names
the builder of the network and its arguments. A network of one's own has no such name, and
`load_model` takes it as an argument.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl import tasks
from jaxfl._support.checks import check_count, check_path, checked, count_from_0, key_of, show
from jaxfl._support.files import kind, replacing
from jaxfl._support.lazy import safetensors, safetensors_numpy
from jaxfl._support.recipes import valid_recipe
from jaxfl.models.frozen import frozen
from jaxfl.models.lora import lora
from jaxfl.models.precision import with_precision
from jaxfl.models.text import gru, transformer
from jaxfl.models.trained import TrainedModel
from jaxfl.models.zoo import digits_cnn, feddpa_cnn, lenet, lenet_groupnorm, mlp, resnet20
from jaxfl.tasks import Task
from jaxfl.types import Model, Params, Tree

FORMAT = 1
"""Version of the format of files. Files of other versions cannot be loaded."""

_TEXT = "jaxfl"
"""Name of the JSON text in a file's header."""

_NETWORKS = (mlp, lenet, lenet_groupnorm, feddpa_cnn, digits_cnn, resnet20, gru, transformer)
_BUILDERS: dict[str, Callable[..., Model]] = {
    build.__name__: build for build in (*_NETWORKS, frozen, lora, with_precision)
}
"""Builders of networks that a file may name, by their names."""

_TASKS: dict[str, Callable[..., Task]] = {
    "classification": tasks.classification,
    "multi_label": tasks.multi_label,
    "regression": tasks.regression,
    "next_token": tasks.next_token,
}
"""Builders of tasks that a file may name, by their names."""

Arrays = dict[str, np.ndarray]
"""Arrays of a file by name, for instance `params/head/kernel`."""


def save_models(path: pathlib.Path, models: Sequence[TrainedModel], about: dict[str, Any]) -> None:
    """Write models of one network into a file, completely or not at all.

    Args:
        path: The file. One that `save_models` wrote before is replaced.
        models: One model, or a model of each client, whose arrays are stacked.
        about: Description of the models as JSON values (see `TrainedModel`). Its `client` is "all"
            if the file holds a model of each client.

    Raises:
        ValueError: The path belongs to something else, which stays unchanged.
    """
    # Replacing a file of another program would lose the user's work.
    if kind(path) is not None and (found := _foreign(path)):
        raise ValueError(
            f"path must be free, or a file that `Result.save` wrote, got {str(path)!r}, {found}. "
            "Choose another path."
        )
    first = models[0]
    arrays = _arrays_of(models, stacked=about["client"] == "all")
    content: dict[str, Any] = {
        "format": FORMAT,
        "about": about,
        "model": {
            "name": first.model.name,
            "input_shape": first.model.input_shape,
            "recipe": _network_recipe(first.model, first.params, arrays),
        },
        "task": {"name": first.model.task.name, "recipe": _recipe(first.model.task)},
    }
    # The digest covers all other entries and the arrays.
    content["sha256"] = _digest(content, arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        safetensors_numpy.save_file(arrays, temporary, {_TEXT: json.dumps(content)})


def _arrays_of(models: Sequence[TrainedModel], *, stacked: bool) -> Arrays:
    """Return the arrays of one model, or of several, as NumPy arrays by name.

    Args:
        models: The models, which share their frozen weights.
        stacked: Whether weights have a leading axis of models. Otherwise only the first counts.
    """
    params = models[0].params
    if stacked:
        all_params = [model.params for model in models]
        params = jax.tree.map(lambda *own: np.stack(own), *all_params)
    named = _named_leaves("params", params) | _named_leaves("frozen", models[0].frozen)
    # Files hold arrays row by row.
    return {name: np.asarray(leaf, order="C") for name, leaf in named.items()}


@checked(path=check_path, client=count_from_0)
def load_model(
    path: str | os.PathLike, *, model: Model | None = None, client: int | None = None
) -> TrainedModel:
    """Load a model that `Result.save` wrote, and return it with the same weights, to the bit.

    Args:
        path: The file.
        model: The network. None builds the one that the file names, which is possible for the
            networks and wrappers of `jaxfl.models` with tasks of `jaxfl.tasks`. Give networks and
            tasks of your own, and the network of a method that extends it for personal models, such
            as `prior_corrected(...).model`.
        client: Number of a client, from 0, if the file holds the models of all clients. None stands
            for the only model of the file.

    Raises:
        ValueError: The file is missing, damaged, of another format, or not written by
            `Result.save`. Its arrays do not fit the network, or no network is given and none can be
            built. The file holds no model of that client, or several models and no client is given.

    >>> import tempfile
    >>> from jaxfl import simulate
    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.data import iid, load, make_clients
    >>> from jaxfl.models import mlp
    >>> digits = load("digits")
    >>> clients = make_clients(digits, iid(digits.train_labels, 20, seed=0), [[]] * 20)
    >>> method = fedavg(mlp((8, 8, 1), 10, hidden=(16,)))
    >>> result = simulate(0, method, clients, rounds=1, progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = result.save(f"{folder}/model.safetensors")
    ...     loaded = load_model(path)
    >>> inputs = digits.test_inputs
    >>> loaded.model.name, bool((loaded(inputs) == result.model()(inputs)).all())
    ('mlp', True)
    """
    path = pathlib.Path(path)
    content, arrays = _read(path)
    about = content["about"]
    index = _client_in(path, about, client)
    if about["client"] == "all":
        arrays = {name: _of_client(name, array, index) for name, array in arrays.items()}
    # Networks compute in 32 bits, as in a run.
    with jax.enable_x64(False):
        network = model
        if network is None:
            network = _network(path, content, arrays)
        params = _of_names(path, network, "params", _shapes(network, arrays), arrays)
        fixed = _of_names(path, network, "frozen", network.frozen, arrays)
    # An array that the network lacks means that it is another network.
    known = _named_leaves("params", params) | _named_leaves("frozen", fixed)
    if unknown := arrays.keys() - known.keys():
        raise ValueError(
            f"model must have all arrays of {str(path)!r}, got model={network.name!r} without "
            f"{min(unknown)!r}. Give the network that was saved."
        )
    return TrainedModel(network, params, fixed, about | {"client": index})


def _client_in(path: pathlib.Path, about: dict[str, Any], client: int | None) -> int | None:
    """Return the index of the client whose model to load, or None for the global model.

    Args:
        path: The file, for errors.
        about: Description of the file's models (see `TrainedModel`).
        client: Index that the caller gave, or None.

    Raises:
        ValueError: The file has no model of this client, or has several models and no index is
            given.
    """
    expected = about["client"]
    if expected == "all":
        if client is not None:
            return check_count("client", client, least=0, most=about["clients"] - 1)
        expected = f"an index of a client from 0 to {about['clients'] - 1}"
    # A file of one model needs no index, and accepts that of its client. A global model has none.
    elif client in (None, expected):
        return expected
    raise ValueError(
        f"client must be {expected} for {str(path)!r}, got {client!r}. Give what the file holds."
    )


def _of_client(name: str, array: np.ndarray, client: int | None) -> np.ndarray:
    """Return a client's entry of an array `params/...`, and the array itself for frozen weights."""
    if name.startswith("params/"):
        return array[client]
    return array


def _read(path: pathlib.Path) -> tuple[dict[str, Any], Arrays]:
    """Return the JSON content and the arrays of a file.

    Raises:
        ValueError: `save_models` did not write the file, another version wrote it, or its digest
            is wrong.
    """
    if found := _foreign(path):
        raise ValueError(
            f"path must be a file that `Result.save` wrote, got {str(path)!r}, {found}. "
            "Choose another file, or save the model again."
        )
    damaged = (
        f"path must be an intact file, got {str(path)!r}, which is damaged. Save the model again."
    )
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            content = json.loads(file.metadata()[_TEXT])
            names = file.keys()
            arrays = {name: file.get_tensor(name) for name in names}
        if content.get("format") != FORMAT:
            raise ValueError(
                f"path must be a file of format {FORMAT}, got {str(path)!r} of format "
                f"{content.get('format')!r}. Use the version of jaxfl that wrote it."
            )
        intact = content.pop("sha256") == _digest(content, arrays)
    except (
        LookupError,
        AttributeError,
        TypeError,
        RecursionError,
        json.JSONDecodeError,
    ) as error:
        # The text may be no JSON, or any JSON, for instance a list, or lack the digest.
        raise ValueError(damaged) from error
    if not intact:
        raise ValueError(damaged)
    return content, arrays


def _foreign(path: pathlib.Path) -> str | None:
    """Return in words what a path is, or None for a file whose header names this project."""
    found = kind(path)
    if found != "a regular file":
        return found or "which is missing"
    # Opening a file reads its header only, and no arrays.
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            ours = _TEXT in (file.metadata() or {})
    except (OSError, safetensors.SafetensorError) as error:
        return f"a damaged or foreign file ({error})"
    if ours:
        return None
    return "safetensors of another program"


def _digest(content: dict[str, Any], arrays: Arrays) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        # Arrays of other shapes may have the same bytes, so the digest covers shapes too.
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _named_leaves(part: str, tree: Tree) -> dict[str, Any]:
    """Return the leaves of a tree by their names in a file, such as `params/head/kernel`.

    Args:
        part: First part of the names: "params" or "frozen".
        tree: The tree.

    Raises:
        ValueError: Two leaves have the same name.
    """
    leaves = jax.tree.leaves_with_path(tree)
    named = {_array_name(part, path): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError(
            f"model must have a name of its own for each array, got {sorted(named)}. Name layers "
            "without slashes."
        )
    return named


def _array_name(part: str, path: tuple[Any, ...]) -> str:
    return f"{part}/{jax.tree_util.keystr(path, simple=True, separator='/')}"


def _shapes(network: Model, arrays: Arrays) -> Params:
    """Return the shapes of a network's weights.

    Entries of no layer are left out if `arrays` lacks one of their arrays.
    """
    shapes = jax.eval_shape(lambda: network.init(key_of(0)))
    return {
        name: part
        for name, part in shapes.items()
        if name in network.layers or _named_leaves("params", {name: part}).keys() <= arrays.keys()
    }


def _of_names(path: pathlib.Path, network: Model, part: str, like: Tree, arrays: Arrays) -> Tree:
    """Return a file's arrays as a tree.

    Args:
        path: The file, for errors.
        network: The network, for errors.
        part: First part of the arrays' names: "params" or "frozen".
        like: Tree with the shapes and dtypes that the arrays must have.
        arrays: Arrays of the file by name.

    Raises:
        ValueError: An array is missing, or has another shape or dtype.
    """

    def array_of(place: tuple[Any, ...], leaf: Any) -> jax.Array:
        name = _array_name(part, place)
        wanted = _described_array(leaf)
        found = _described_array(arrays.get(name))
        if found != wanted:
            raise ValueError(
                f"model must fit {str(path)!r}, got model={network.name!r} whose {name} is "
                f"{wanted}, and the file has {found}. Give the network that was saved."
            )
        return jnp.asarray(arrays[name])

    return jax.tree.map_with_path(array_of, like)


def _described_array(array: Any) -> str:
    """Return the dtype and shape of an array as text, or "none" for None."""
    if array is None:
        return "none"
    return f"{array.dtype}{tuple(array.shape)}"


def _network_recipe(network: Model, params: Params, arrays: Arrays) -> dict[str, Any] | None:
    """Return the recipe by which a builder makes a network of these weights, as JSON.

    None stands for a network that no builder makes with weights of these names and shapes.

    Args:
        network: The network.
        params: Weights of one model.
        arrays: All arrays of the file.
    """
    made = valid_recipe(network)
    recipe = _recipe(network)
    trained = _named_leaves("params", params)
    if made is None or recipe is None or any(entry in params for entry in made.without):
        return None
    # A network among the arguments may have had other fields, such as another head.
    again = _shapes(_built(recipe, arrays), arrays)
    shapes = {name: leaf.shape for name, leaf in _named_leaves("params", again).items()}
    if shapes != {name: array.shape for name, array in trained.items()}:
        return None
    return recipe


def _recipe(value: Any) -> dict[str, Any] | None:
    """Return the recipe of a network or a task as JSON, with `builder` and `arguments`.

    None stands for a network or a task that no builder made, or whose arguments JSON cannot hold.
    Weights among the arguments are left out, because the file has them.
    """
    recipe = valid_recipe(value)
    if recipe is None:
        return None
    arguments: dict[str, Any] = {}
    for name, argument in recipe.arguments.items():
        if isinstance(argument, Model):
            argument = _recipe(argument)
            if argument is None:
                return None
        # Weights that a builder got are in the file.
        if name != "params":
            arguments[name] = argument
    try:
        text = json.dumps({"builder": recipe.builder, "arguments": arguments})
    except TypeError:
        return None
    # Reading the text gives the arguments as a file has them, with lists in place of tuples.
    return json.loads(text)


def _network(path: pathlib.Path, content: dict[str, Any], arrays: Arrays) -> Model:
    """Return the network that a file names, with its task.

    Raises:
        ValueError: The file names no builder of the network or the task, or the builder fails.
    """
    recipe = content["model"]["recipe"]
    task = content["task"]["recipe"]
    for subject, entry in (("network", content["model"]), ("task", content["task"])):
        if entry["recipe"] is None:
            name = entry["name"]
            raise ValueError(
                f"model must be given for {str(path)!r}, whose {subject} {name!r} no builder of "
                "jaxfl makes, got None. Give the network, for instance method.model."
            )
    try:
        arguments = dict(task["arguments"])
        # The file may come from anybody, so its names and arguments are checked like a user's.
        chosen = _TASKS[task["builder"]](*arguments.pop("metrics"), **arguments)
        return _built(recipe, arrays)._replace(task=chosen)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"path must be a file whose network can be built, got {str(path)!r} with "
            f"{show(recipe)}: {str(error).removesuffix('.')}. Give the network as `model`."
        ) from error


def _built(recipe: dict[str, Any], arrays: Arrays) -> Model:
    """Return the network of a recipe. Zeros stand for weights, which are in the file."""
    arguments = dict(recipe["arguments"])
    name = recipe["builder"]
    # A wrapper such as `frozen` got a model, whose recipe is inside of the wrapper's own.
    if "model" in arguments:
        base = _built(arguments["model"], arrays)
        arguments["model"] = base
        if name in ("frozen", "lora"):
            arguments["params"] = _zeros(base, sum(array.size for array in arrays.values()))
    return _BUILDERS[name](**arguments)


def _zeros(network: Model, most: int) -> Params:
    """Return zeros with the shapes of a network's weights.

    Raises:
        ValueError: The network has more than `most` weights, the number of entries in the file.
    """
    # A forged file could name a network that is larger than the memory.
    shapes = jax.eval_shape(lambda: network.init(key_of(0)))
    needed = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    if needed > most:
        raise ValueError(
            f"params must be in the file, got a network of {needed} weights and a file of {most}"
        )
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

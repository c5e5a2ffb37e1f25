"""Fine-tuning before evaluation, around any method."""

from collections.abc import Sequence

import jax
import optax
from jax import Array
from jaxtyping import Key

from jaxfl._support.checks import check_layers, checked, not_empty
from jaxfl.local.train import LocalSGD, fit_layers
from jaxfl.types import Algorithm, ClientData, Params, Tree

_BEFORE = 2**31 + 11
"""Number that derives the key of the method's own `personalize` from a client's key."""


@checked(parts=not_empty(check_layers))
def fine_tuned(
    algorithm: Algorithm,
    *,
    local: LocalSGD = LocalSGD(optax.sgd(0.01), epochs=15),
    parts: Sequence[str] | None = None,
) -> Algorithm:
    """Evaluate a method after every client has trained its model further on its own examples.

    Each client starts from the model with which the method would evaluate it. The steps of `local`
    then change only the layers that `parts` names. Every client trains, whether or not it took part
    in a round, and discards the result after the evaluation.

    Args:
        algorithm: Any method. Methods that share a model gain the most.
        local: Optimizer, batches and epochs of the training before an evaluation.
        parts: Names of the layers that train. None trains all layers. A `dp_fedavg` that
            fine-tunes the head's layers, `model.head`, is `dp_fedavg_fb`.

    Guarantee: The guarantee of the method, which sends the same messages as without fine-tuning.
        Fine-tuned models have joint privacy: each client is protected against all other clients,
        but its model depends on its own data. Publishing fine-tuned models voids the guarantee.
    References: Yu, Bagdasaryan, Shmatikov, Salvaging Federated Learning by Local Adaptation, 2020
        (arXiv:2002.04758).

    Raises:
        ValueError: One of the `parts` is not a layer of the model.

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.models import mlp
    >>> fine_tuned(fedavg(mlp((8, 8, 1), 10, hidden=(16,))), parts=("head",)).name
    'fine_tuned(fedavg)'
    """
    model = algorithm.model
    layers: Sequence[str] = model.layers
    if parts is not None:
        layers = parts
    unknown = [name for name in layers if name not in model.layers]
    if unknown:
        raise ValueError(
            f"parts must be layers of model={model.name!r}, got {unknown[0]!r}. "
            f"Choose from {', '.join(model.layers)}."
        )

    def personalize(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> Params:
        # The method may train for an evaluation too, so its draws have a key of their own.
        own_key = jax.random.fold_in(key, _BEFORE)
        start = algorithm.personalize(own_key, server, client, data)
        return fit_layers(key, model, start, data, local=local, layers=layers)

    return algorithm._replace(name=f"fine_tuned({algorithm.name})", personalize=personalize)

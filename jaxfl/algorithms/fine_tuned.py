"""Fine-tuning before evaluation, around any method."""

from collections.abc import Sequence

import jax
import optax
from jax import Array
from jaxtyping import Key

from jaxfl._validate import check_layers, checked, not_empty
from jaxfl.local.train import LocalSGD, fit_layers
from jaxfl.types import Algorithm, ClientData, Params, Tree

_BEFORE = 2**31 + 11


@checked(parts=not_empty(check_layers))
def fine_tuned(
    algorithm: Algorithm,
    *,
    local: LocalSGD = LocalSGD(optax.sgd(0.01), epochs=15),
    parts: Sequence[str] | None = None,
) -> Algorithm:
    """Evaluate a method after every client has trained its model further on its own examples.

    A client starts from the model that the method would evaluate it with, and takes the steps of
    `local` in the layers of `parts` alone. Every client does so, participant or not, and nothing of
    it is kept.

    Args:
        algorithm: any method; best one that shares a model.
        local: how a client trains before evaluation.
        parts: names of the layers that train; None: all of them. With those of the head,
            `model.head`, around `dp_fedavg` it is `dp_fedavg_fb`.

    Guarantee: the method's, whose messages are sent; for each client against all others (joint
        privacy): its fine-tuned model depends on its own data. Publishing it voids this.
    References: Yu, Bagdasaryan, Shmatikov, Salvaging Federated Learning by Local Adaptation, 2020
        (arXiv:2002.04758).

    Raises:
        ValueError: a part is no layer of the model.

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.models import mlp
    >>> fine_tuned(fedavg(mlp((8, 8, 1), 10, hidden=(16,))), parts=("head",)).name
    'fine_tuned(fedavg)'
    """
    model = algorithm.model
    layers = model.layers if parts is None else parts
    if unknown := [name for name in layers if name not in model.layers]:
        raise ValueError(
            f"parts must be layers of model={model.name!r}, got {unknown[0]!r}. Choose from {', '.join(model.layers)}."
        )

    def personalize(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> Params:
        start = algorithm.personalize(jax.random.fold_in(key, _BEFORE), server, client, data)
        return fit_layers(key, model, start, data, local=local, layers=layers)

    return algorithm._replace(name=f"fine_tuned({algorithm.name})", personalize=personalize)

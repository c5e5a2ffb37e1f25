"""Predictions that know how often a client has each class, around any method."""

import contextlib

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import at_least_0, checked
from jaxfl.models.extended import extended, outputs_of
from jaxfl.tasks import logits_offset
from jaxfl.types import Algorithm, ClientData, Model, Number, Params, Tree

_ENTRY = "log_prior"
"""What a client's parameters have beside the layers."""

_NEVER = -1e30
"""The offset of a class that is ruled out: finite, because the padding's loss times 0 must be 0."""


@checked(smoothing=at_least_0)
def prior_corrected(
    algorithm: Algorithm,
    *,
    smoothing: Number = 0.1,
    train: bool = False,
) -> Algorithm:
    r"""Correct a method's predictions by the shares of classes among each client's own examples.

    .. math::
        p_i(y | x) \propto p(y | x) \frac{\pi_i(y)}{\pi(y)}, \qquad
        \pi_i(y) = \frac{n_i(y) + s}{n_i + s K}, \qquad
        \pi(y) = \frac{1}{K}

    where :math:`n_i(y)` of a client's :math:`n_i` training examples are of class y, one of K. On
    logits it is the offset :math:`\log \pi_i(y)`. A client with equally many examples of each class
    has the method's predictions, and so has one without any.

    Args:
        algorithm: any method for a classification.
        smoothing: s, examples that are added to every class. 0 predicts no class but the client's
            own: another one has probability 0 (1e30 in the loss, in place of infinity).
        train: whether local training has the offset too, in rounds and before evaluation. The
            shared model then learns what counts of labels do not tell (logit adjustment; with
            s = 0, the restricted softmax). False suits methods that evaluate a shared model: one
            trained on the client's own examples knows its classes, and would be corrected twice.

    Guarantee: the method's. Counts of labels stay with the client. With `train` its update depends
        on them, and the mechanism clips it as ever. For each client against all others (joint
        privacy): its offset depends on its own data. Publishing it voids this.
    Deviations from the paper: pi is uniform, as if the shared model had seen all classes equally
        often; a count of all clients' labels, released with noise, is not offered yet. FedRS scales
        the weights of missing classes, which s = 0 leaves out.
    References: Saerens, Latinne, Decaestecker, Adjusting the Outputs of a Classifier to New a
        Priori Probabilities, Neural Computation 2002; Menon et al., Long-Tail Learning via Logit
        Adjustment, ICLR 2021; Li and Zhan, FedRS: Federated Learning with Restricted Softmax for
        Label Distribution Non-IID Data, KDD 2021.

    Raises:
        ValueError: the task is no classification, or the outputs are not one logit for each class;
            `train` with private local steps, or with a method that has a loss of its own.

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.models import mlp
    >>> prior_corrected(fedavg(mlp((8, 8, 1), 10, hidden=(16,))), smoothing=0.0).name
    'prior_corrected(fedavg)'
    """
    model = algorithm.model
    classes = classes_of("algorithm", model)
    if train and algorithm.dp_sgd is not None:
        raise ValueError(
            f"train must be False with private local steps, got True with "
            f"algorithm={algorithm.name!r}. Leave train out: each example would change the "
            "gradients of a client's other ones, which no noise hides."
        )

    def offset_of(data: ClientData) -> Float[Array, "K"]:
        return log_prior(data, classes, smoothing)

    def start(key: Key[Array, ""]) -> Float[Array, "K"]:
        del key
        return jnp.zeros(classes)

    def add(offset: Float[Array, "K"], logits: Array, x: Array) -> Float[Array, "B K"]:
        del x
        return logits + offset.astype(logits.dtype)[None]

    def personalize(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> Params:
        offset = offset_of(data)
        with logits_offset(offset) if train else contextlib.nullcontext():
            params = algorithm.personalize(key, server, client, data)
        return {**params, _ENTRY: offset}

    def client_update(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> tuple:
        with logits_offset(offset_of(data)) as offset:
            updated = algorithm.client_update(key, server, client, data)
        if not offset.read:
            raise ValueError(
                f"train must be False for a method with a loss of its own, got True with "
                f"algorithm={algorithm.name!r}. Leave train out, or give the method the task's "
                "loss, for instance by ppsgd(loss=None)."
            )
        return updated

    return algorithm._replace(
        name=f"prior_corrected({algorithm.name})",
        model=extended(model, _ENTRY, start, add),
        client_update=client_update if train else algorithm.client_update,
        personalize=personalize,
    )


def classes_of(argument: str, model: Model) -> int:
    """Return the number of classes that a model has logits for.

    Args:
        argument: the one that the model comes from, for errors.
        model: the network.

    Raises:
        ValueError: its task is no classification, or its outputs are not one logit for each class.
    """
    if model.task.name != "classification":
        raise ValueError(
            f"{argument} must be for a classification, got model={model.name!r} with "
            f"task={model.task.name!r}. Choose another method: only classes have shares."
        )
    outputs = outputs_of(model)
    if len(outputs.shape) != 2:
        raise ValueError(
            f"{argument} must have a model with logits [B, K], got {outputs.shape} of "
            f"model={model.name!r} for a batch of 2. Give a network with one output for each class."
        )
    return outputs.shape[1]


def log_prior(data: ClientData, classes: int, smoothing: Number = 0.0) -> Float[Array, "K"]:
    """Return the logarithms of the shares of classes among a client's examples, over the largest share.

    A factor of all classes changes no prediction. By this one the logarithms are exactly 0 where all
    counts are equal, also where all are 0. `smoothing` examples are added to every class first.
    """
    positions = jnp.arange(data.padded)
    _, labels = data.take(positions)
    real = positions < data.size
    weights = real.astype(jnp.float32)
    counts = jnp.bincount(labels.astype(jnp.int32), weights=weights, length=classes) + smoothing
    most = jnp.max(counts)
    shares = jnp.where(most > 0, counts / jnp.maximum(most, 1e-30), 1.0)
    return jnp.where(shares > 0, jnp.log(jnp.where(shares > 0, shares, 1.0)), _NEVER)

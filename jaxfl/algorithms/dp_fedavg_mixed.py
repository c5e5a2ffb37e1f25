"""DP-FedAvg that every client adapts to its own examples, and mixes with a model of its own."""

import functools

import optax

from jaxfl._support.checks import GAUSSIAN, at_least_0, check_count, check_positive, checked
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.algorithms.fine_tuned import fine_tuned
from jaxfl.algorithms.matrix_scaled import matrix_scaled
from jaxfl.algorithms.mixed import mixed
from jaxfl.algorithms.prior_corrected import prior_corrected
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.sampling import Sampling
from jaxfl.types import Algorithm, Model, Number


@checked(
    **GAUSSIAN,
    penalty=check_positive,
    smoothing=at_least_0,
    train=check_positive,
    folds=functools.partial(check_count, least=2),
)
def dp_fedavg_mixed(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    local: LocalSGD = LocalSGD(optax.sgd(0.05)),
    train: Number | None = 40.0,
    penalty: Number | None = 4.0,
    smoothing: Number | None = None,
    tuning: LocalSGD | None = LocalSGD(optax.sgd(0.01), epochs=5),
    alone: LocalSGD = LocalSGD(optax.sgd(0.05), epochs=20),
    folds: int = 3,
    delta: float | None = None,
) -> Algorithm:
    r"""Build a private shared model that every client personalises for itself.

    `experiments/map` compares this recipe with other methods.

    .. math::
        p_i(y | x) = \lambda_i \, p(y | x; v_i)
            + (1 - \lambda_i) \, \mathrm{softmax}(z(x; \theta_i) A_i + b_i)_y

    The shared model :math:`\theta` is DP-FedAvg's. Each participant trains it through a linear map
    of logits, which it fits to its own examples (`matrix_scaled`). Before an evaluation client i
    fits a map :math:`(A_i, b_i)` to the final model, and trains :math:`\theta` further to
    :math:`\theta_i` through it (`fine_tuned`). The client also trains :math:`v_i` alone, and mixes
    both by a weight :math:`\lambda_i`, which it chooses on examples left out of both (`mixed`). If
    the noise leaves the shared model useless, the weight falls back on the client's own model.
    Personalisation costs no further epsilon.

    Use a linear model on features of a public encoder (`jaxfl.data.features`) if there is one.

    Args:
        model: The network, for a classification if there are maps or corrections.
        clip: C, the L2 bound on a client's full update.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        local: Local training of a client in one round.
        train: Penalty of the maps that clients fit in the rounds, as a number of examples. None
            trains the model itself.
        penalty: Penalty of the map before an evaluation, in examples. None leaves the map out.
        smoothing: Number of examples that are added to every class of a client, whose shares of
            classes then correct its predictions (`prior_corrected`) in place of a map. None
            corrects nothing. Choose between a map and a correction on validation examples, as you
            choose a learning rate: the correction is better where clients differ in nothing but
            their labels, and costs some accuracy where labels do not differ.
        tuning: Training of the shared model by a client before evaluation. None leaves it out.
        alone: Training of a client's own model, with as many epochs as training alone takes.
        folds: Number of parts of a client's examples, each of which is left out once.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: The guarantee of `dp_fedavg`, whose clip bound and noise cover what is sent:
        client-level privacy under zero-out adjacency, for the observer of sums and broadcasts, with
        sensitivity C. Predictions have joint privacy: each client is protected against all other
        clients, but its predictions depend on its own data. Publishing predictions voids the
        guarantee.
    References: The parts are those of `dp_fedavg`, `matrix_scaled`, `prior_corrected`, `fine_tuned`
        and `mixed`. Their combination is the project's own.

    Raises:
        ValueError: Both a penalty and smoothing are given. The task is not a classification, though
            there are maps or corrections, or `mixed` does not take the task.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> model = mlp((64,), 10, hidden=())
    >>> dp_fedavg_mixed(model, clip=1.0, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'dp_fedavg_mixed'
    """
    if penalty is not None and smoothing is not None:
        raise ValueError(
            "smoothing must be None if there is a penalty, because a map also learns how frequent "
            f"classes are, got smoothing={smoothing!r}, penalty={penalty!r}. Give penalty=None too."
        )
    private = dp_fedavg(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        local=local,
        delta=delta,
    )
    if train is not None:
        through_maps = matrix_scaled(private, train=train)
        # Only the update is taken, because an evaluation fits a map of its own, or none.
        private = private._replace(client_update=through_maps.client_update)
    adapted = private
    if penalty is not None:
        adapted = matrix_scaled(private, penalty=penalty)
    elif smoothing is not None:
        adapted = prior_corrected(private, smoothing=smoothing)
    personal = adapted
    # Fine-tuning wraps the map or the correction, so that the shared model trains through it.
    if tuning is not None:
        personal = fine_tuned(adapted, local=tuning)
    # The mixture comes last, because each of its folds repeats all of this without some examples.
    return mixed(personal, local=alone, folds=folds)._replace(name="dp_fedavg_mixed")

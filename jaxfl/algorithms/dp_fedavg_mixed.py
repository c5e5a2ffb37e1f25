"""DP-FedAvg whose clients personalise the shared model, and mix it with one of their own."""

import optax

from jaxfl._validate import GAUSSIAN, at_least_0, checked
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.algorithms.fine_tuned import fine_tuned
from jaxfl.algorithms.mixed import mixed
from jaxfl.algorithms.prior_corrected import prior_corrected
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.sampling import Sampling
from jaxfl.types import Algorithm, Model, Number


@checked(**GAUSSIAN, smoothing=at_least_0)
def dp_fedavg_mixed(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    local: LocalSGD = LocalSGD(optax.sgd(0.05)),
    tuning: LocalSGD = LocalSGD(optax.sgd(0.01), epochs=5),
    alone: LocalSGD = LocalSGD(optax.sgd(0.05), epochs=20),
    smoothing: Number | None = 0.1,
    folds: int = 3,
    delta: float | None = None,
) -> Algorithm:
    r"""Build the map's recipe: a private shared model that every client personalises for itself.

    .. math::
        p_i(y | x) = \lambda_i \, p(y | x; v_i) + (1 - \lambda_i) \, p(y | x; \theta_i), \qquad
        p(y | x; \theta_i) \propto e^{f_y(x; \theta_i)} \, \pi_i(y)

    The shared model :math:`\theta` is DP-FedAvg's. Before evaluation client i trains it further to
    :math:`\theta_i`, with its own shares of classes :math:`\pi_i` in the loss and the predictions
    (`fine_tuned` around `prior_corrected`). The client also trains :math:`v_i` alone. The client
    mixes both by a weight :math:`\lambda_i`, which it chooses on examples left out of both
    (`mixed`). If the noise leaves the shared model useless, the weight falls back on the client's
    own model. Personalisation costs no further epsilon.

    Use a linear model on features of a public encoder (`jaxfl.data.features`) if there is one.

    Args:
        model: The network, for a classification if predictions are corrected.
        clip: C, the L2 bound on a client's full update.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        local: Local training of a client in one round.
        tuning: Training of the shared model by a client before evaluation.
        alone: Training of a client's own model, with as many epochs as training alone takes.
        smoothing: Number of examples that the correction adds to every class of a client. None
            leaves :math:`\pi_i` out. Choose it on validation examples, as a rate: a correction
            gains much where clients differ in their labels, and costs some accuracy where they do
            not, because a few labels never look equally frequent.
        folds: Number of parts of a client's examples, each of which is left out once.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: The guarantee of `dp_fedavg`, whose messages are sent: client-level privacy under
        zero-out adjacency, for the observer of sums and broadcasts, with sensitivity C. Predictions
        have joint privacy: each client is protected against all other clients, but its predictions
        depend on its own data. Publishing predictions voids the guarantee.
    References: The parts are those of `dp_fedavg`, `fine_tuned`, `prior_corrected` and `mixed`.
        Their combination is the project's own.

    Raises:
        ValueError: The task is no classification, or no task that `mixed` takes if `smoothing` is
            None.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> model = mlp((64,), 10, hidden=())
    >>> dp_fedavg_mixed(model, clip=1.0, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'dp_fedavg_mixed'
    """
    private = dp_fedavg(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        local=local,
        delta=delta,
    )
    corrected = private if smoothing is None else prior_corrected(private, smoothing=smoothing)
    personal = fine_tuned(corrected, local=tuning)
    return mixed(personal, local=alone, folds=folds)._replace(name="dp_fedavg_mixed")

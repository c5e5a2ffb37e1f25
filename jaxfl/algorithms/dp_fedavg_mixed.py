"""DP-FedAvg of logits that clients translate, mixed with a model of each client's own."""

import optax

from jaxfl._validate import GAUSSIAN, checked
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.algorithms.fine_tuned import fine_tuned
from jaxfl.algorithms.matrix_scaled import matrix_scaled
from jaxfl.algorithms.mixed import mixed
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.sampling import Sampling
from jaxfl.types import Algorithm, Model, Number


@checked(**GAUSSIAN)
def dp_fedavg_mixed(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    local: LocalSGD = LocalSGD(optax.sgd(0.05)),
    alone: LocalSGD = LocalSGD(optax.sgd(0.05), epochs=20),
    tuning: LocalSGD | None = None,
    penalty: Number = 40.0,
    train: Number = 40.0,
    folds: int = 3,
    delta: float | None = None,
) -> Algorithm:
    r"""Build the map's recipe: a private shared model that every client personalises for itself.

    .. math::
        p_i(y | x) = \lambda_i \, p(y | x; v_i)
            + (1 - \lambda_i) \, \mathrm{softmax}(z(x; \theta) A_i + b_i)_y

    The shared model :math:`\theta` is DP-FedAvg's. Each participant trains it through a linear map
    of logits that the participant fits to its own examples (`matrix_scaled`). Before an evaluation
    client i fits its map :math:`(A_i, b_i)` to the final model. With `tuning` the client then
    trains :math:`\theta` further through its map (`fine_tuned`). The client also trains :math:`v_i`
    alone. The client mixes both by a weight :math:`\lambda_i`, which it chooses on examples left
    out of both (`mixed`). If the noise leaves the shared model useless, the weight falls back on
    the client's own model. Personalisation costs no further epsilon.

    Use a linear model on features of a public encoder (`jaxfl.data.features`) if there is one.

    Args:
        model: The network, for a classification.
        clip: C, the L2 bound on a client's full update.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        local: Local training of a client in one round.
        alone: Training of a client's own model, with as many epochs as training alone takes.
        tuning: Training of the shared model by a client before evaluation. None leaves it out.
        penalty: Penalty of the map before an evaluation, in examples (see `matrix_scaled`). Choose
            it on validation examples, as a rate: a small one gains much where clients differ in
            their labels, and costs some accuracy where they do not.
        train: Penalty of the maps in rounds.
        folds: Number of parts of a client's examples, each of which is left out once.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: The guarantee of `dp_fedavg`, whose clip bound and noise cover what is sent:
        client-level privacy under zero-out adjacency, for the observer of sums and broadcasts, with
        sensitivity C. Predictions have joint privacy: each client is protected against all other
        clients, but its predictions depend on its own data. Publishing predictions voids the
        guarantee.
    References: The parts are those of `dp_fedavg`, `matrix_scaled`, `fine_tuned` and `mixed`. Their
        combination is the project's own.

    Raises:
        ValueError: The task is not a classification, or the outputs are not one logit for each
            class.

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
    personal = matrix_scaled(private, penalty=penalty, train=train)
    if tuning is not None:
        personal = fine_tuned(personal, local=tuning)
    mixture = mixed(personal, local=alone, folds=folds)
    return mixture._replace(name="dp_fedavg_mixed")

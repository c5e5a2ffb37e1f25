"""Linear classifiers from one noisy sum of statistics.

Clients send statistics of frozen features once. The server computes the head in closed form. Each
client may correct this head by its own statistics, which stay with the client.
"""

import collections
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.extend import core
from jaxtyping import Bool, Float, Key

from jaxfl._support.checks import GAUSSIAN, checked, key_of
from jaxfl.local.sums import summed
from jaxfl.local.train import check_head
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms, Tree

Statistics = Callable[[Float[Array, "B F"], Float[Array, "B K"]], Tree]
"""Function from a batch's features and one-hot labels to sums over its examples.

Features and labels of padding are 0.
"""

Linear = tuple[Float[Array, "F K"], Float[Array, "K"]]
"""Kernel and bias of a head."""

Correction = Callable[[Linear, Tree, Number], Linear]
"""Function that returns a client's own head.

Its arguments are the server's head, the client's summed statistics, and the weight of the server's
head as a number of examples.
"""


class OneShotServer(NamedTuple):
    """State of a server that sets the head to the solution of its summed aggregates."""

    params: Params
    """Parameters with the head of the last round."""
    total: Tree
    """Sum of the aggregates of all rounds."""
    rounds: Float[Array, ""]
    """Number of rounds in the sum."""


@checked(**GAUSSIAN)
def dp_ridge(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling = Full(),
    ridge: Number = 0.01,
    radius: Number = 1.0,
    personal: Number | None = 1.0,
    scale: Number = 10.0,
    delta: float | None = None,
) -> Algorithm:
    r"""Build ridge regression on frozen features, from one noisy sum of second moments.

    The features are :math:`x = (\min(1, R / |\phi|) \, \phi, R)`, whose last entry stands for the
    bias. The labels y are one-hot. Client i sends the means
    :math:`A_i = \frac{1}{n_i} \sum x x^\top` and :math:`B_i = \frac{1}{n_i} \sum x y^\top`, clipped
    together to the norm C. The server solves for W, and every client corrects the solution by its
    own examples:

    .. math::
        W = ([\bar A]_+ + \lambda I)^{-1} \bar B, \qquad
        W_i = (n_i A_i + \mu I)^{-1} (n_i B_i + \mu W)

    Here :math:`[\cdot]_+` replaces the negative eigenvalues, which only noise can cause, by 0. The
    second equation minimises :math:`\sum |y - W_i^\top x|^2 + \mu |W_i - W|^2`. Run one round.
    Further rounds cost more privacy, and their aggregates are averaged.

    Args:
        model: A network for classification whose head is one dense layer. Its other layers keep
            their first weights, so give an extractor that was pretrained on public data, or a
            linear model.
        clip: C, L2 bound on a client's statistics. Their norm is at most
            :math:`R \sqrt{4 R^2 + 2}`.
        noise_multiplier: z, std of the noise on the sum, in units of C (see
            `jaxfl.privacy.calibrate` with rounds=1).
        sampling: Rule that draws the participants of each round. The default draws all clients.
        ridge: :math:`\lambda`, in units of squared features. More noise needs a larger value.
        radius: R, public bound to which the statistics clip an example's features. Predictions
            take features unclipped.
        personal: :math:`\mu`, weight of the server's head in a client's own head, as a number of
            examples. None evaluates every client with the server's head.
        scale: Factor from outputs, about 0 to 1, to logits. The factor changes the loss and no
            prediction.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy with zero-out adjacency and sensitivity C, for the observer of
        sums and broadcasts. A client's own head depends on its own data. Publishing own heads voids
        the guarantee.

    Raises:
        ValueError: The model's head is not one dense layer, or its task is not classification.

    References: The sums are the sufficient statistics of Vu and Slavkovic 2009 and Wang 2018
        (Revisiting differentially private linear regression, UAI). The norm is bounded for each
        client, not for each example.

    >>> from jaxfl.models import mlp
    >>> dp_ridge(mlp((8, 8, 1), 10, hidden=()), clip=1.0, noise_multiplier=1.0).name
    'dp_ridge'
    """

    def statistics(x: Float[Array, "B F"], hot: Float[Array, "B K"]) -> Tree:
        # These are the batch's parts of n_i A_i and n_i B_i.
        extended = _extended(x, hot, radius)
        return {"second": extended.T @ extended, "cross": extended.T @ hot}

    def solve(mean: Tree) -> Linear:
        # Noise is independent on both sides of the diagonal, so the noisy mean is not symmetric.
        values, vectors = jnp.linalg.eigh(mean["second"], symmetrize_input=True)
        # The ridge is above 0, so no division is by 0.
        inverse = 1 / (jnp.maximum(values, 0) + ridge)
        return _linear(vectors @ (inverse[:, None] * (vectors.T @ mean["cross"])))

    def correct(head: Linear, total: Tree, weight: Number) -> Linear:
        kernel, bias = head
        # This inverts `_linear`, and gives the W of the server.
        before = jnp.concatenate([kernel, bias[None] / radius]) / scale
        second = total["second"] + weight * jnp.eye(len(before))
        cross = total["cross"] + weight * before
        # The matrix is positive definite, because mu is above 0.
        return _linear(jax.scipy.linalg.solve(second, cross, assume_a="pos"))

    def _linear(weights: Float[Array, "F1 K"]) -> Linear:
        return scale * weights[:-1], scale * radius * weights[-1]

    return _one_shot(
        "dp_ridge",
        model,
        statistics,
        solve,
        correct,
        personal,
        Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling),
        Terms(delta),
    )


@checked(**GAUSSIAN)
def dp_prototypes(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling = Full(),
    least_share: Number = 0.01,
    radius: Number = 1.0,
    personal: Number | None = 1.0,
    scale: Number = 10.0,
    delta: float | None = None,
) -> Algorithm:
    r"""Build a nearest-mean classifier on frozen features, from one noisy sum of class means.

    The features are :math:`x = \min(1, R / |\phi|) \, \phi`. Client i sends two statistics of each
    class k: the sum of its features :math:`s_{ik} = \frac{1}{n_i} \sum_{y = k} x`, and the share
    :math:`R \, p_{ik} = R \, n_{ik} / n_i` of its examples. All statistics are clipped together to
    the norm C. The server divides the sums by the shares. Every client corrects the prototypes by
    its own examples:

    .. math::
        \mu_k = \frac{\bar s_k}{\max(\bar p_k, p_{\min})}, \qquad
        \mu_{ik} = \frac{n_i s_{ik} + \mu \, \mu_k}{n_{ik} + \mu}

    The logit of class k is :math:`c \, (\mu_k \cdot \phi - |\mu_k|^2 / 2)`, which is largest at the
    nearest prototype. Run one round. Further rounds cost more privacy, and their aggregates are
    averaged.

    Args:
        model: A network for classification whose head is one dense layer. Its other layers keep
            their first weights, so give an extractor that was pretrained on public data, or a
            linear model.
        clip: C, L2 bound on a client's statistics. Their norm is at most :math:`\sqrt{2} R`.
        noise_multiplier: z, std of the noise on the sum, in units of C (see
            `jaxfl.privacy.calibrate` with rounds=1).
        sampling: Rule that draws the participants of each round. The default draws all clients.
        least_share: :math:`p_{\min}`, least share of a class in the division, since noise may leave
            a share of 0 or less.
        radius: R, public bound to which the statistics clip an example's features. Predictions
            take features unclipped.
        personal: :math:`\mu`, weight of a prototype of the server in a client's own prototype, as a
            number of examples. None evaluates every client with the server's prototypes.
        scale: c, the factor of all logits. The factor changes the loss and no prediction.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy with zero-out adjacency and sensitivity C, for the observer of
        sums and broadcasts. A client's own prototypes depend on its own data. Publishing own
        prototypes voids the guarantee.

    Raises:
        ValueError: The model's head is not one dense layer, or its task is not classification.

    References: Snell et al., Prototypical Networks for Few-shot Learning, NeurIPS 2017. The sums
        of clients are as in Tan et al., FedProto, AAAI 2022.

    >>> from jaxfl.models import mlp
    >>> dp_prototypes(mlp((8, 8, 1), 10, hidden=()), clip=1.0, noise_multiplier=1.0).name
    'dp_prototypes'
    """

    def statistics(x: Float[Array, "B F"], hot: Float[Array, "B K"]) -> Tree:
        return {"features": hot.T @ _clipped(x, radius), "share": radius * hot.sum(axis=0)}

    def solve(mean: Tree) -> Linear:
        share = jnp.maximum(mean["share"] / radius, least_share)
        return _linear(mean["features"] / share[:, None])

    def correct(head: Linear, total: Tree, weight: Number) -> Linear:
        kernel, _ = head
        count = total["share"][:, None] / radius
        # The server's prototypes are the kernel's columns, without the factor of the logits.
        features = total["features"] + weight * kernel.T / scale
        # The divisor is at least mu, also for a class that the client does not have.
        return _linear(features / (count + weight))

    def _linear(prototypes: Float[Array, "K F"]) -> Linear:
        # The bias is the constant -c |mu_k|^2 / 2 of the logits.
        return scale * prototypes.T, -0.5 * scale * jnp.sum(prototypes**2, axis=1)

    return _one_shot(
        "dp_prototypes",
        model,
        statistics,
        solve,
        correct,
        personal,
        Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling),
        Terms(delta),
    )


def _one_shot(
    name: str,
    model: Model,
    statistics: Statistics,
    solve: Callable[[Tree], Linear],
    correct: Correction,
    personal: Number | None,
    mechanism: Mechanism,
    terms: Terms,
) -> Algorithm:
    """Build the method whose clients send mean statistics and whose server solves for the head.

    Args:
        name: Name of the method.
        model: The network, with one dense head.
        statistics: Function that sums the statistics of a batch.
        solve: Function from the mean of the aggregates to the server's head.
        correct: Function that returns a client's own head.
        personal: Weight of the server's head in a client's own head, as a number of examples. None
            evaluates every client with the server's head.
        mechanism: Sampling, clip bound and noise.
        terms: Failure probability of the privacy statement.
    """
    layer, features, classes = _dense_head(model)
    extract = model.extract
    assert extract is not None
    one_input = jax.ShapeDtypeStruct((1, features), jnp.float32)
    one_label = jax.ShapeDtypeStruct((1, classes), jnp.float32)
    shapes = jax.eval_shape(statistics, one_input, one_label)

    def sums(params: Params, data: ClientData) -> Tree:
        def of_batch(x: Array, labels: Array, real: Bool[Array, "B"]) -> Tree:
            # Sums over many examples need single precision, whatever the network's dtype.
            features = extract(params, x).astype(jnp.float32)
            hot = jax.nn.one_hot(labels, classes)
            is_real = real[:, None]
            # Features of padding are not 0 by themselves, because layers have biases.
            return statistics(jnp.where(is_real, features, 0), jnp.where(is_real, hot, 0))

        return summed(model, data, of_batch)

    def init(key: Key[Array, ""], num_clients: int) -> tuple[OneShotServer, Tree]:
        del num_clients
        zeros = optax.tree.zeros_like(shapes)
        return OneShotServer(model.init(key), zeros, jnp.zeros(())), ()

    def client_update(
        key: Key[Array, ""], server: OneShotServer, client: Tree, data: ClientData
    ) -> tuple:
        del key
        # A client without examples sends zeros.
        share = 1 / jnp.maximum(data.size, 1)
        mean = optax.tree.scale(share, sums(server.params, data))
        return Message(mean), client, {}

    def server_update(server: OneShotServer, aggregate: Tree) -> OneShotServer:
        total = optax.tree.add(server.total, aggregate)
        rounds = server.rounds + 1
        head = solve(optax.tree.scale(1 / rounds, total))
        return OneShotServer(_with_head(server.params, layer, head), total, rounds)

    def personalize(
        key: Key[Array, ""], server: OneShotServer, client: Tree, data: ClientData
    ) -> Params:
        del key, client
        if personal is None:
            return server.params
        shared = _single_precision_head(server.params, layer)
        # The extractor never changes, so these features are those of the server's statistics.
        own = correct(shared, sums(server.params, data), personal)
        return _with_head(server.params, layer, own)

    return Algorithm(
        name=name,
        model=model,
        init=init,
        client_update=client_update,
        server_update=server_update,
        personalize=personalize,
        mechanism=mechanism,
        terms=terms,
    )


def _with_head(params: Params, layer: str, head: Linear) -> Params:
    """Return the parameters with another head, in the dtypes of the head before."""
    kernel, bias = head
    old = params[layer]
    # The solution is in single precision, and the network's dtype may be another one.
    new = {
        "kernel": kernel.astype(old["kernel"].dtype),
        "bias": bias.astype(old["bias"].dtype),
    }
    return {**params, layer: new}


def _single_precision_head(params: Params, layer: str) -> Linear:
    """Return the head in single precision."""
    kernel = params[layer]["kernel"]
    bias = params[layer]["bias"]
    # A client's sums are in single precision too, whatever the network's dtype.
    return kernel.astype(jnp.float32), bias.astype(jnp.float32)


def _dense_head(model: Model) -> tuple[str, int, int]:
    """Return the name, the number of features and the number of classes of the model's head.

    Raises:
        ValueError: The task is not classification, or the head is not one dense layer on features
            that the model can extract.
    """
    check_head(model)
    if model.task.name != "classification":
        raise ValueError(
            f"model.task must be classification, got {model.task.name!r}. "
            "Give a model for a classification."
        )
    params: dict[str, Any] = jax.eval_shape(model.init, key_of(0))
    layer = model.head[0]
    shapes = {name: leaf.shape for name, leaf in params[layer].items() if hasattr(leaf, "shape")}
    dense = shapes.keys() == {"kernel", "bias"} and len(shapes["kernel"]) == 2
    single = len(model.head) == 1 and dense and model.extract is not None
    if not single or not _is_linear(model, layer, params[layer]):
        raise ValueError(
            f"model must end with one dense layer on features that it can extract, got "
            f"{model.name!r} with the head {model.head!r}. Give a model of jaxfl.models, or a "
            "module with methods `extract` and `classify`."
        )
    return layer, *shapes["kernel"]


_LINEAR = {
    "add",
    "add_any",
    "broadcast_in_dim",
    "convert_element_type",
    "dot_general",
    "reshape",
    "squeeze",
    "transpose",
}
"""JAX primitives that may occur in the program for features times a kernel plus a bias."""


def _is_linear(model: Model, layer: str, shapes: Params) -> bool:
    """Return whether the head only multiplies features by the kernel and adds the bias."""
    assert model.classify is not None
    classify = model.classify
    features = jax.ShapeDtypeStruct((2, shapes["kernel"].shape[0]), jnp.float32)
    # An activation or a further layer shows in the primitives of the program.
    program = jax.make_jaxpr(lambda head, x: classify({layer: head}, x))(shapes, features)
    primitives = collections.Counter(_primitives(program.jaxpr))
    return primitives.keys() <= _LINEAR and primitives["dot_general"] == 1


def _primitives(program: core.Jaxpr) -> Iterator[str]:
    """Yield the names of a program's primitives, also of those inside nested programs."""
    for operation in program.eqns:
        parts = [
            value
            for value in operation.params.values()
            if isinstance(value, core.ClosedJaxpr | core.Jaxpr)
        ]
        # An operation that runs other programs, such as a `jit`, counts by their operations.
        if not parts:
            yield operation.primitive.name
        for part in parts:
            inner = part.jaxpr if isinstance(part, core.ClosedJaxpr) else part
            yield from _primitives(inner)


def _clipped(x: Float[Array, "B F"], radius: Number) -> Float[Array, "B F"]:
    """Return the rows of x, of which those longer than `radius` are scaled down to it."""
    norm = jnp.linalg.norm(x, axis=1, keepdims=True)
    # A row of zeros stays zero, because the divisor is above 0.
    return x * jnp.minimum(1, radius / jnp.maximum(norm, 1e-30))


def _extended(
    x: Float[Array, "B F"], hot: Float[Array, "B K"], radius: Number
) -> Float[Array, "B F1"]:
    """Return clipped features with a last entry `radius`, or 0 for padding.

    The one-hot labels of padding sum to 0.
    """
    clipped = _clipped(x, radius)
    last = radius * hot.sum(axis=1, keepdims=True)
    return jnp.concatenate([clipped, last], axis=1)

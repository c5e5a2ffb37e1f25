"""A plain twin of the engine: a Python loop over clients and a NumPy server.

It shares no code with the engine, so that tests can compare the two.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.data import load
from jaxfl.privacy.mechanisms import PrivateMask
from jaxfl.types import ClientData, StepNoise

DIGITS = load("digits")


def run(key, algorithm, clients, rounds):
    """Run rounds as the engine's documentation states them, one client at a time.

    Return the last server state, the list of client states, and the list of aggregates. A round
    whose cohort is empty has no aggregate if the denominator counts participants.
    """
    mechanism, count = algorithm.mechanism, clients.num_clients
    rows = padded(clients.train)
    init_key, run_key, _ = jax.random.split(key, 3)
    server, states = jax.jit(lambda key: algorithm.init(key, clients.num_clients))(init_key)
    states = [jax.tree.map(lambda leaf, i=i: leaf[i], jax.device_get(states)) for i in range(count)]
    update_fn, server_update = jax.jit(algorithm.client_update), jax.jit(algorithm.server_update)
    aggregates = []  # of rounds that moved the server
    released, spent = np.zeros(count), np.zeros(count)
    release, least_total = (
        getattr(mechanism, "release", None),
        getattr(mechanism, "least_total", 0.0),
    )
    for t in range(rounds):
        round_key = jax.random.fold_in(run_key, t)
        sample_key, client_key, client_noise_key, server_noise_key, release_key, _, steps_key = (
            jax.random.fold_in(round_key, p) for p in range(7)
        )
        sampled = np.asarray(mechanism.sampling.sample(sample_key, count, t))
        table_row = lambda table, t=t: np.broadcast_to(table[min(t, len(table) - 1)], (count,))  # noqa: E731
        weights, noise = table_row(mechanism.weight_table), table_row(mechanism.client_noise_table)
        z = mechanism.noise_multiplier_table[min(t, len(mechanism.noise_multiplier_table) - 1)]
        if release is not None:
            noise = noise / np.asarray(release.shares(jnp.asarray(released, jnp.float32)))
        cost = np.zeros(count)
        if least_total:
            cost = 4 / noise**2 + (0 if release is None else 1 / release.noise**2)
            sampled = sampled & (spent + cost <= 0.9999 / least_total**2)
        total, variance = None, 0.0
        for i in np.flatnonzero(sampled):
            data = ClientData(
                clients.inputs, clients.labels, rows[i], clients.train_size[i], i, round=t
            )
            old, own_key = states[i], jax.random.fold_in(client_key, i)
            if algorithm.dp_sgd is not None:
                multiplier = np.broadcast_to(algorithm.dp_sgd.noise_multiplier, (count,))[i]
                data = dataclasses.replace(
                    data, noise=StepNoise(jnp.float32(multiplier), jax.random.fold_in(steps_key, i))
                )
            message, states[i], _ = update_fn(own_key, server, old, data)
            if release is not None:
                width = release.high - release.low
                error = jax.random.normal(jax.random.fold_in(release_key, i), (1,))[0]
                told = np.clip(message.extra, release.low, release.high)
                if release.noise:
                    told = np.clip(told + error * release.noise * width, release.low, release.high)
                released[i] = told
            spent[i] += cost[i]
            update = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), message.update)
            update = clip(update, mechanism.clip)
            if noise[i] > 0:
                drawn = gaussian(jax.random.fold_in(client_noise_key, i), message.update)
                update = jax.tree.map(
                    lambda u, n, s=noise[i]: u + n * s * mechanism.clip, update, drawn
                )
            if isinstance(mechanism, PrivateMask):
                update = jax.tree.map(lambda u, m: u * m, update, message.extra)
            update = jax.tree.map(lambda u, w=weights[i]: w * u, update)
            total = update if total is None else jax.tree.map(np.add, total, update)
            variance += (weights[i] * noise[i]) ** 2
        if total is None and mechanism.denominator == "participants":
            continue  # the denominator shows that nobody was there
        if total is None:
            data = ClientData(clients.inputs, clients.labels, rows[0], clients.train_size[0], 0)
            shape = jax.eval_shape(update_fn, client_key, server, states[0], data)[0].update
            total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), shape)
        if z > 0:
            std = np.sqrt(max(0.0, (z * weights.max()) ** 2 - variance)) * mechanism.clip
            drawn = gaussian(server_noise_key, total)
            total = jax.tree.map(lambda u, n, s=std: u + n * s, total, drawn)
        share = mechanism.sampling.expected(count) / count
        realised = float(weights[sampled].sum()) or 1.0
        denominator = weights.sum() * share if mechanism.denominator == "expected" else realised
        aggregate = jax.tree.map(lambda leaf, d=denominator: (leaf / d).astype(np.float32), total)
        server = server_update(server, aggregate)
        aggregates.append(aggregate)
    return server, states, aggregates


def clip(update, bound):
    """Return v min(1, C / |v|) for an update v and a bound C, with the L2 norm of all leaves."""
    norm = np.sqrt(sum(float(np.sum(leaf**2)) for leaf in jax.tree.leaves(update)))
    factor = 1.0 if norm <= bound else bound / norm
    return jax.tree.map(lambda leaf: leaf * factor, update)


def gaussian(key, like):
    """Draw standard normal leaves with the shapes of `like`: one vector, cut in their order."""
    leaves, structure = jax.tree.flatten(like)
    flat = np.asarray(jax.random.normal(key, (sum(leaf.size for leaf in leaves),)))
    cuts = np.cumsum([leaf.size for leaf in leaves])[:-1]
    return jax.tree.unflatten(
        structure, [d.reshape(v.shape) for d, v in zip(np.split(flat, cuts), leaves)]
    )


def fit(params, inputs, labels, order, batch_size, learning_rate, loss_gradient):
    """Return the parameters after plain SGD over batches in the given order of examples."""
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        gradient = loss_gradient(params, inputs[rows], labels[rows])
        params = jax.tree.map(lambda p, g: p - learning_rate * g, params, gradient)
    return params


def torch_sgd(params, gradient_of, steps, *, learning_rate):
    """Return the parameters after steps of torch.optim.SGD with momentum 0.9.

    The weight decay of 1e-4 is in the gradient.
    """
    params = jax.device_get(params)
    velocity = jax.tree.map(np.zeros_like, params)
    for _ in range(steps):
        gradient = jax.tree.map(lambda g, p: np.asarray(g) + 1e-4 * p, gradient_of(params), params)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
        params = jax.tree.map(lambda p, v: p - learning_rate * v, params, velocity)
    return params


def padded(lists, extra=0):
    """Return lists of rows as a matrix, whose lines end in padding of 0.

    The longest list has `extra` columns of padding.
    """
    matrix = np.zeros((len(lists), max(map(len, lists)) + extra), np.int32)
    for line, own in zip(matrix, lists, strict=True):
        line[: len(own)] = own
    return matrix


def client(size, positions):
    """Return a client with `size` training digits from index 100 on, padded to `positions`."""
    rows = np.zeros(positions, np.int32)
    rows[:size] = np.arange(100, 100 + size)
    return ClientData(
        jnp.asarray(DIGITS.train_inputs),
        jnp.asarray(DIGITS.train_labels),
        jnp.asarray(rows),
        jnp.int32(size),
    )


def whole_gradient(data):
    """Return a function from parameters to `numpy_gradient` of all of a client's examples."""
    inputs, labels = map(np.asarray, data.take(jnp.arange(data.size)))
    return lambda params: numpy_gradient(params, inputs, labels)


def add(tree, scale, other):
    """Return tree + scale * other, leaf by leaf."""
    return jax.tree.map(lambda a, b: a + scale * b, tree, other)


def double(params):
    """Return parameters on the host in double precision."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def numpy_gradient(params, inputs, labels):
    """Return gradients by hand, in double precision, of a perceptron's mean cross-entropy.

    The perceptron has a dense layer, ReLU and a dense head.
    """
    x = inputs.transpose(0, 3, 1, 2).reshape(len(inputs), -1).astype(np.float64) * 2 / 255 - 1
    (w1, b1), (w2, b2) = ((params[n]["kernel"], params[n]["bias"]) for n in ("dense_0", "head"))
    hidden = np.maximum(x @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    d = (p - np.eye(10)[labels]) / len(labels)
    back = (d @ w2.T) * (hidden > 0)
    gradients = ((x.T @ back, back.sum(0)), (hidden.T @ d, d.sum(0)))
    return {n: {"kernel": k, "bias": b} for n, (k, b) in zip(("dense_0", "head"), gradients)}

"""Networks over tokens: a recurrent network and a transformer.

Inputs are whole numbers [B, L] of any type, bytes included, at least 0 and below the size of the
vocabulary. Outputs are [B, L, K] or [B, K]. The former are predictions at every position from the
tokens up to it (`jaxfl.tasks.next_token`). The latter are one prediction after the last token.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from jaxfl._support.checks import checked
from jaxfl._support.recipes import with_recipe
from jaxfl.models.layers import Classifier, FirstAxisDense
from jaxfl.models.wrap import from_flax
from jaxfl.tasks import classification, next_token
from jaxfl.types import Model

_ONE_HOT = 512
"""Largest vocabulary whose embeddings are looked up by a matrix product.

The gradient of the product is a product too, while the gradient of an indexed table is a scatter.
"""


@checked()
@with_recipe
def gru(
    vocabulary: int = 80,
    length: int = 80,
    outputs: int | None = None,
    *,
    embedding: int = 32,
    width: int = 64,
    every: bool = True,
) -> Model:
    """Return a gated recurrent unit between embeddings and a dense head.

    Args:
        vocabulary: V, the number of different tokens.
        length: L, the number of tokens in an example.
        outputs: K, the number of outputs. The default is V.
        embedding: Size of an embedding.
        width: Size of the state.
        every: Whether every position predicts the next token. False gives one prediction after the
            last token, for a classification.

    >>> gru().layers, sum(a.size for a in jax.tree.leaves(gru().init(jax.random.key(0))))
    (('embed', 'recurrent', 'head'), 26448)

    References: Cho et al. 2014 (arXiv:1406.1078), with the reset gate after the product as in
        cuDNN.
    """
    module = _Gru(vocabulary, outputs or vocabulary, embedding, width, every)
    return _text_model("gru", module, length, every, vocabulary)


@checked()
@with_recipe
def transformer(
    vocabulary: int = 80,
    length: int = 128,
    outputs: int | None = None,
    *,
    width: int = 128,
    blocks: int = 4,
    heads: int = 4,
    every: bool = True,
) -> Model:
    """Return a causal transformer with learned positions, GELU, no dropout, and a dense head.

    Layer normalisation comes before each part of a block. The head shares no weights with the
    embeddings.

    Args:
        vocabulary: V, the number of different tokens.
        length: L, the number of tokens in an example.
        outputs: K, the number of outputs. The default is V.
        width: Size of an embedding. The hidden layer of a block is four times as wide.
        blocks: Number of blocks, each of which is a layer of the model.
        heads: Number of attention heads in a block, a divisor of `width`.
        every: Whether every position predicts the next token. False gives one prediction after the
            last token, for a classification.

    Raises:
        ValueError: `heads` does not divide `width`.

    >>> transformer(blocks=2).layers
    ('embed', 'position', 'block_0', 'block_1', 'norm', 'head')

    References: Vaswani et al. 2017 (arXiv:1706.03762); Radford et al. 2019 (GPT-2).
    """
    if width % heads:
        raise ValueError(
            f"heads must be a divisor of width={width}, got {heads}. Choose one of its divisors."
        )
    module = _Transformer(vocabulary, outputs or vocabulary, length, width, blocks, heads, every)
    return _text_model("transformer", module, length, every, vocabulary)


def _text_model(name: str, module: nn.Module, length: int, every: bool, vocabulary: int) -> Model:
    task = next_token() if every else classification()
    options: dict[str, Any] = {
        "prepare": _whole,
        "task": task,
        # These networks have no convolutions, so they are evaluated as they are.
        "form": "lax",
        "vocabulary": vocabulary,
    }
    return from_flax(module, (length,), head=("head",), name=name, **options)


def _whole(tokens: Shaped[Array, "B L"]) -> Int[Array, "B L"]:
    """Return tokens of any whole type, such as bytes, as int32."""
    return tokens.astype(jnp.int32)


class _Recurrent(nn.Module):
    r"""Gated recurrent unit, whose states h start at zero, on inputs x that are rows of a table.

    .. math::
        r, z &= \sigma(W_{rz} x + b_{rz} + U_{rz} h) \\
        n &= \tanh(W_n x + b_n + r (U_n h + c)) \\
        h' &= (1 - z) n + z h

    The products of x are computed once for each row of the table, which leaves one product to a
    step.
    """

    width: int

    @nn.compact
    def __call__(
        self, table: Float[Array, "V E"], tokens: Int[Array, "B L"]
    ) -> Float[Array, "B L width"]:
        width = self.width
        # The scan runs over positions, so these come first.
        ahead = nn.Dense(3 * width, name="input")(table)[tokens.T]
        kernel = self.param("recurrent", nn.initializers.lecun_normal(), (width, 3 * width))
        offset = self.param("offset", nn.initializers.zeros, (width,))

        # A scan's state keeps its dtype, so it starts in that of the products, such as bfloat16.
        start = jnp.zeros((len(tokens), width), ahead.dtype)
        step = functools.partial(_recurrent_step, kernel, offset)
        _, states = lax.scan(step, start, ahead)
        return states.swapaxes(0, 1)


def _recurrent_step(
    kernel: Array, offset: Array, state: Array, inputs: Array
) -> tuple[Array, Array]:
    """Return the next state, twice, from the products of one position's inputs."""
    width = state.shape[-1]
    # Both gates come first among the products, and then the new state.
    gates, new = jnp.split(inputs, [2 * width], axis=-1)
    from_gates, from_new = jnp.split(state @ kernel, [2 * width], axis=-1)
    reset, keep = jnp.split(jax.nn.sigmoid(gates + from_gates), 2, axis=-1)
    new = jnp.tanh(new + reset * (from_new + offset[None]))
    # This is (1 - z) n + z h by one product.
    state = new + keep * (state - new)
    return state, state


class _Gru(Classifier):
    """A network of embeddings, a gated recurrent unit and a dense head."""

    vocabulary: int
    outputs: int
    embedding: int
    width: int
    every: bool

    def setup(self) -> None:
        self.embed = nn.Embed(self.vocabulary, self.embedding)
        self.recurrent = _Recurrent(self.width)
        self.head = nn.Dense(self.outputs)

    def extract(self, tokens: Array) -> Array:
        # The unit gets the table itself, because it multiplies each row of it only once.
        features = self.recurrent(self.embed.embedding, tokens)
        if self.every:
            return features
        return features[:, -1]


class _Transformer(Classifier):
    """A network of token and position embeddings, blocks, layer normalisation and a dense head.

    Activations are feature-major, (features, B, L), so that sums over features run over contiguous
    positions. Scores of attention are (keys, queries), and their sums run over contiguous queries.
    """

    vocabulary: int
    outputs: int
    length: int
    width: int
    blocks: int
    heads: int
    every: bool

    def setup(self) -> None:
        initial = nn.initializers.normal(0.02)
        self.embed = nn.Embed(self.vocabulary, self.width, embedding_init=initial)
        self.position = nn.Embed(self.length, self.width, embedding_init=initial)
        self.block = [_TransformerBlock(self.heads) for _ in range(self.blocks)]
        self.norm = _Norm()
        self.head = nn.Dense(self.outputs)

    def extract(self, tokens: Array) -> Array:
        x = _look_up(self.embed.embedding, tokens)
        x = x + self.position.embedding[: tokens.shape[1]].T[:, None]
        for block in self.block:
            x = block(x)
        if self.every:
            return self.norm(x).transpose(1, 2, 0)
        # Only the last position is used, so no other is normalised.
        return self.norm(x[..., -1:]).transpose(1, 2, 0)[:, 0]


class _TransformerBlock(nn.Module):
    """A block of a transformer: x + attention(norm(x)), then x + dense(GELU(dense(norm(x)))).

    A token attends to itself and to the tokens before it. The shape of x is [F, B, L]. The hidden
    layer between the two dense ones is four times as wide.
    """

    heads: int

    @nn.compact
    def __call__(self, x: Float[Array, "F B L"]) -> Float[Array, "F B L"]:
        width, batch, length = x.shape
        size = width // self.heads
        # One product makes queries, keys and values.
        projected = FirstAxisDense(3 * width, name="attention")(_Norm(name="attention_norm")(x))
        projected = projected.reshape(3, self.heads, size, batch, length)
        projected = projected.transpose(0, 1, 3, 2, 4)
        mixed = _attend(*projected).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + FirstAxisDense(width, name="attention_out")(mixed)
        hidden = FirstAxisDense(4 * width, name="hidden")(_Norm(name="hidden_norm")(x))
        return x + FirstAxisDense(width, name="hidden_out")(nn.gelu(hidden))


class _Norm(nn.Module):
    """A layer normalisation over the first axis."""

    @nn.compact
    def __call__(self, x: Float[Array, "F B L"]) -> Float[Array, "F B L"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[0],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[0],))
        return _standardize(x) * scale[:, None, None] + bias[:, None, None]


@jax.custom_vjp
def _standardize(x: Float[Array, "F B L"]) -> Float[Array, "F B L"]:
    """Return x with mean 0 and variance 1 over the first axis."""
    return _standardize_forward(x)[0]


def _standardize_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    centred = x - _mean(x)
    scale = lax.rsqrt(_mean(centred**2) + 1e-6)
    return centred * scale, (centred * scale, scale)


def _standardize_backward(saved: tuple[Array, Array], slope: Array) -> tuple[Array]:
    # The rule is written out, because XLA would fuse JAX's own with the sums of the residual path,
    # and compute these sums again for every feature.
    y, scale = saved
    return ((slope - _mean(slope) - y * _mean(slope * y)) * scale,)


def _mean(x: Float[Array, "F B L"]) -> Float[Array, "1 B L"]:
    return jnp.mean(x, 0, keepdims=True)


_standardize.defvjp(_standardize_forward, _standardize_backward)


def _attend(
    queries: Float[Array, "H B S L"], keys: Float[Array, "H B S L"], values: Float[Array, "H B S L"]
) -> Float[Array, "H B S L"]:
    """Return each position's mean of the values up to it, weighted by a softmax of scores.

    Scores are divided by the square root of S, the size of a head.
    """
    size, length = queries.shape[-2:]
    scores = jnp.einsum("hbsk,hbsq->hbkq", keys, queries * size**-0.5)
    # Scores are (keys, queries). Each query has its own key, so no column is -inf throughout.
    past = np.triu(np.ones((1, 1, length, length), bool))
    scores = jnp.where(past, scores, -math.inf)
    # The largest score cancels in the quotient below, so its gradient is 0.
    largest = lax.stop_gradient(jnp.max(scores, -2, keepdims=True))
    weights = jnp.exp(scores - largest)
    # The division comes after the product, with S divisions for a query and not one for each key.
    sums = jnp.einsum("hbsk,hbkq->hbsq", values, weights)
    return sums / jnp.sum(weights, -2)[:, :, None]


def _look_up(table: Float[Array, "V F"], tokens: Int[Array, "B L"]) -> Float[Array, "F B L"]:
    """Return the rows of a table that tokens index, with features on the first axis."""
    if len(table) > _ONE_HOT:
        return table[tokens].transpose(2, 0, 1)
    row = tokens.reshape(1, -1)
    words = jnp.arange(len(table))[:, None]
    one_hot = (row == words).astype(table.dtype)
    return (table.T @ one_hot).reshape(-1, *tokens.shape)

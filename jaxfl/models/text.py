"""Networks over tokens: a recurrent one, and a transformer.

Inputs are whole numbers [D, L] below the size of the vocabulary, of any type, bytes included. Outputs are [B, L, K] at
every position, each of the tokens up to there (`jaxfl.tasks.next_token`), or [B, K] after the last one.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from jaxfl._validate import checked
from jaxfl.models.layers import FirstAxisDense
from jaxfl.models.wrap import from_flax
from jaxfl.tasks import classification, next_token
from jaxfl.types import Model

_ONE_HOT = 512
"""Largest vocabulary whose embeddings are looked up by a matrix product, whose gradient is another and no scatter."""


@checked()
def gru(
    vocabulary: int = 80,
    length: int = 80,
    outputs: int | None = None,
    *,
    embedding: int = 32,
    width: int = 64,
    every: bool = True,
) -> Model:
    """A gated recurrent unit between embeddings and a dense head.

    Args:
        vocabulary: V, number of tokens.
        length: L, tokens of an example.
        outputs: K; None: V.
        embedding: size of an embedding.
        width: of the state.
        every: outputs at every position, of the next token; otherwise one after the last, a classification.

    >>> gru().layers, sum(a.size for a in jax.tree.leaves(gru().init(jax.random.key(0))))
    (('embed', 'recurrent', 'head'), 26448)

    References: Cho et al. 2014 (arXiv:1406.1078), with the reset gate after the product, as in cuDNN.
    """
    module = _Gru(vocabulary, outputs or vocabulary, embedding, width, every)
    return _model("gru", module, length, every, vocabulary)


@checked()
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
    """A causal transformer: learned positions, layer normalisation first, GELU, no dropout, a head of its own.

    Args:
        vocabulary: V, number of tokens.
        length: L, tokens of an example.
        outputs: K; None: V.
        width: of embeddings; each block has a hidden layer of four times as many.
        blocks: number of blocks, each a layer of the model.
        heads: of attention in a block, a divisor of `width`.
        every: outputs at every position, of the next token; otherwise one after the last, a classification.

    Raises:
        ValueError: a width that the heads do not divide.

    >>> transformer(blocks=2).layers
    ('embed', 'position', 'block_0', 'block_1', 'norm', 'head')

    References: Vaswani et al. 2017 (arXiv:1706.03762); Radford et al. 2019 (GPT-2).
    """
    if width % heads:
        raise ValueError(f"heads={heads}: give a divisor of width={width}")
    module = _Transformer(vocabulary, outputs or vocabulary, length, width, blocks, heads, every)
    return _model("transformer", module, length, every, vocabulary)


def _model(name: str, module: nn.Module, length: int, every: bool, vocabulary: int) -> Model:
    task = next_token() if every else classification()
    options: dict[str, Any] = {
        "prepare": _whole,
        "task": task,
        "form": "lax",
        "vocabulary": vocabulary,
    }
    return from_flax(module, (length,), head=("head",), name=name, **options)


def _whole(tokens: Shaped[Array, "B L"]) -> Int[Array, "B L"]:
    return tokens.astype(jnp.int32)


class _Network(nn.Module):
    def classify(self, features: Array) -> Array:
        return self.head(features)

    def __call__(self, tokens: Array) -> Array:
        return self.classify(self.extract(tokens))


class _Recurrent(nn.Module):
    r"""A gated recurrent unit, from zero states, on inputs that are one of a few.

    .. math::
        r, z = \sigma(W_{rz} x + b_{rz} + U_{rz} h), \quad n = \tanh(W_n x + b_n + r (U_n h + c)), \quad
        h' = (1 - z) n + z h

    The part of x is the same wherever x is: computed once for each, it leaves one product to a step.
    """

    width: int

    @nn.compact
    def __call__(
        self, table: Float[Array, "V E"], tokens: Int[Array, "B L"]
    ) -> Float[Array, "B L width"]:
        width = self.width
        ahead = nn.Dense(3 * width, name="input")(table)[tokens.T]
        kernel = self.param("recurrent", nn.initializers.lecun_normal(), (width, 3 * width))
        offset = self.param("offset", nn.initializers.zeros, (width,))

        def step(state: Array, inputs: Array) -> tuple[Array, Array]:
            gates, new = jnp.split(inputs, [2 * width], axis=-1)
            from_gates, from_new = jnp.split(state @ kernel, [2 * width], axis=-1)
            reset, keep = jnp.split(jax.nn.sigmoid(gates + from_gates), 2, axis=-1)
            new = jnp.tanh(new + reset * (from_new + offset[None]))
            state = new + keep * (state - new)
            return state, state

        return lax.scan(step, jnp.zeros((len(tokens), width), ahead.dtype), ahead)[1].swapaxes(0, 1)


class _Gru(_Network):
    """Embeddings, a gated recurrent unit, a dense head."""

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
        features = self.recurrent(self.embed.embedding, tokens)
        return features if self.every else features[:, -1]


class _Transformer(_Network):
    """Token and position embeddings, blocks, layer normalisation, a dense head.

    Activations are feature-major, (features, B, L): sums over features then run over contiguous positions, and so do
    those of attention, whose scores are (keys, queries).
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
        self.block = [_Block(self.heads) for _ in range(self.blocks)]
        self.norm = _Norm()
        self.head = nn.Dense(self.outputs)

    def extract(self, tokens: Array) -> Array:
        x = _look_up(self.embed.embedding, tokens)
        x = x + self.position.embedding[: tokens.shape[1]].T[:, None]
        for block in self.block:
            x = block(x)
        return self.norm(x if self.every else x[..., -1:]).transpose(1, 2, 0)[
            :, slice(None) if self.every else 0
        ]


class _Block(nn.Module):
    """x + attention(norm(x)), then x + dense(GELU(dense(norm(x)))), four times as wide in between."""

    heads: int

    @nn.compact
    def __call__(self, x: Float[Array, "F B L"]) -> Float[Array, "F B L"]:
        (width, batch, length), size = x.shape, x.shape[0] // self.heads
        projected = FirstAxisDense(3 * width, name="attention")(_Norm(name="attention_norm")(x))
        projected = projected.reshape(3, self.heads, size, batch, length).transpose(0, 1, 3, 2, 4)
        mixed = _attend(*projected).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + FirstAxisDense(width, name="attention_out")(mixed)
        hidden = FirstAxisDense(4 * width, name="hidden")(_Norm(name="hidden_norm")(x))
        return x + FirstAxisDense(width, name="hidden_out")(nn.gelu(hidden))


class _Norm(nn.Module):
    """Layer normalisation over the first axis."""

    @nn.compact
    def __call__(self, x: Float[Array, "F B L"]) -> Float[Array, "F B L"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[0],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[0],))
        return _standardize(x) * scale[:, None, None] + bias[:, None, None]


@jax.custom_vjp
def _standardize(x: Float[Array, "F B L"]) -> Float[Array, "F B L"]:
    """Mean 0 and variance 1 over the first axis."""
    return _standardize_forward(x)[0]


def _standardize_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    centred = x - _mean(x)
    scale = lax.rsqrt(_mean(centred**2) + 1e-6)
    return centred * scale, (centred * scale, scale)


def _standardize_backward(kept: tuple[Array, Array], slope: Array) -> tuple[Array]:
    # Written out: XLA would fuse it with the sums of the residual path, and compute those for every feature anew.
    y, scale = kept
    return ((slope - _mean(slope) - y * _mean(slope * y)) * scale,)


def _mean(x: Float[Array, "F B L"]) -> Float[Array, "1 B L"]:
    return jnp.mean(x, 0, keepdims=True)


_standardize.defvjp(_standardize_forward, _standardize_backward)


def _attend(
    queries: Float[Array, "H B S L"], keys: Float[Array, "H B S L"], values: Float[Array, "H B S L"]
) -> Float[Array, "H B S L"]:
    """Each position's mean of the values up to it, weighted by the softmax of scaled scores."""
    size, length = queries.shape[-2:]
    scores = jnp.einsum("hbsk,hbsq->hbkq", keys, queries * size**-0.5)
    past = np.triu(np.ones((1, 1, length, length), bool))
    scores = jnp.where(past, scores, -math.inf)
    weights = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, -2, keepdims=True)))
    return jnp.einsum("hbsk,hbkq->hbsq", values, weights) / jnp.sum(weights, -2)[:, :, None]


def _look_up(table: Float[Array, "V F"], tokens: Int[Array, "B L"]) -> Float[Array, "F B L"]:
    if len(table) > _ONE_HOT:
        return table[tokens].transpose(2, 0, 1)
    one_hot = (tokens.reshape(1, -1) == jnp.arange(len(table))[:, None]).astype(table.dtype)
    return (table.T @ one_hot).reshape(-1, *tokens.shape)

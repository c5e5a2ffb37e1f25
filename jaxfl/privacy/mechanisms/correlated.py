"""Noise that is correlated over rounds, so that more of it cancels in the model (banded matrix factorisation)."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Key

from jaxfl._validate import checked, show
from jaxfl.privacy.mechanisms.gaussian import FIELDS, Mechanism
from jaxfl.privacy.noise import add_gaussian
from jaxfl.privacy.observers import Observer, View, one_gaussian
from jaxfl.privacy.sampling import Full
from jaxfl.privacy.sums import add, narrow, widen
from jaxfl.types import Ledger, Tree


@checked(**FIELDS)
@dataclasses.dataclass(frozen=True, eq=False)
class BandedNoise(Mechanism):
    r"""Noise :math:`n_t = \xi_t - \sum_{k=1}^{b-1} c_k n_{t-k}` with fresh :math:`\xi_t \sim N(0, z^2 C^2)`.

    That is :math:`n = C_b^{-1} \xi` for the lower-triangular Toeplitz matrix :math:`C_b` of the b coefficients
    :math:`c_k = \binom{2k}{k} / 4^k`, the first ones of the square root of the matrix of ones. The memory is the last
    b - 1 noises: b - 1 times the size of an update.

    Args:
        noise_multiplier: z of the fresh noise, one number for all rounds, by the server.
        bands: b; 1 is independent noise.

    Guarantee: zero-out of a client that takes part in every one of T rounds, for the observer of sums: one Gaussian of
        multiplier :math:`z / \|C_b \mathbf{1}\|_2`, exactly: of updates of at most C, equal ones are the worst, since
        :math:`C_b^\top C_b` has no negative entry. No other sampler has an epsilon here.
    Source: Choquette-Choo et al., (Amplified) Banded Matrix Factorization, NeurIPS 2023; Fichtenberger et al., Constant
        Matters, ICML 2023 (coefficients).
    """

    bands: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_multiplier_table.size > 1 or self.clients_noisy or self.noise == "grid":
            raise ValueError(
                f"noise_multiplier={show(self.noise_multiplier)}, client_noise={show(self.client_noise)}, "
                f"noise={self.noise!r}: correlated noise is the server's, of one multiplier, in 'float'"
            )

    def init(self, key: Key[Array, "*S"], update: Callable[[], Tree], clients: int) -> Tree:
        """No noise before the first round."""
        del key, clients
        return jax.tree.map(lambda leaf: jnp.zeros((self.bands - 1, *leaf.shape)), update())

    def add_server_noise(
        self, key: Key[Array, "*S"], memory: Tree, update: Tree, std: Float[Array, ""], mesh: Mesh
    ) -> tuple[Tree, Tree]:
        """The round's noise, which is remembered over its std."""
        del mesh
        fresh = add_gaussian(key, jax.tree.map(jnp.zeros_like, narrow(update)), jnp.ones(()))
        before = jnp.asarray(coefficients(self.bands)[1:], jnp.float32)
        noise = jax.tree.map(lambda leaf, past: leaf - jnp.tensordot(before, past, 1), fresh, memory)
        memory = jax.tree.map(lambda leaf, past: jnp.concatenate([leaf[None], past])[: len(past)], noise, memory)
        return add(update, widen(jax.tree.map(lambda leaf: leaf * std, noise))), memory

    def view(self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False) -> View:
        """One Gaussian for the run."""
        view = super().view(ledger, observer, replaced=replaced, one_round=one_round)
        if view.whole or observer == "upload" or self.bands == 1:
            return view
        if not isinstance(self.sampling, Full):
            return one_gaussian(0.0, "none", "correlated noise has no accounting here but for full participation")
        rounds = 1 if one_round else len(ledger.participants)
        exposure = math.sqrt(np.sum(np.cumsum(np.pad(coefficients(self.bands), (0, rounds))[:rounds]) ** 2))
        multiplier = float(view.multiplier.min()) / exposure
        run = one_gaussian(multiplier, f"{view.theorem}, banded factorisation", view.silent)
        return run._replace(replaced=replaced, grows=True)


@functools.cache
def coefficients(bands: int) -> Float[np.ndarray, "b"]:
    """The first coefficients of the square root of the matrix of ones.

    >>> coefficients(4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    k = np.arange(1, bands)
    return np.cumprod(np.r_[1.0, (2 * k - 1) / (2 * k)])

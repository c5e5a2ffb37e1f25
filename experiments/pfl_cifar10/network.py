"""The network of pfl-research's CIFAR-10 benchmark."""

import flax.linen as nn
import jax


class Pfl(nn.Module):
    """The benchmark's CNN, with 1,626,442 parameters for CIFAR-10.

    With 62 classes and 28x28x1 pixels, this is also the usual CNN for FEMNIST.
    """

    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return logits [B, K]. Dropout draws only if `train` is true."""
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, (3, 3), padding="VALID")(x))
        x = nn.Dropout(0.25, deterministic=not train)(nn.max_pool(x, (2, 2), (2, 2)))
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(self.classes)(nn.Dropout(0.5, deterministic=not train)(x))

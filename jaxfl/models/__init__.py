"""Networks as pure functions."""

from jaxfl.models.frozen import frozen
from jaxfl.models.lora import lora
from jaxfl.models.minilm import minilm_classifier
from jaxfl.models.precision import with_precision
from jaxfl.models.text import gru, transformer
from jaxfl.models.weights import with_weights
from jaxfl.models.wrap import from_flax, from_nnx
from jaxfl.models.zoo import build, digits_cnn, feddpa_cnn, lenet, lenet_groupnorm, mlp, resnet20

__all__ = [
    "build",
    "digits_cnn",
    "feddpa_cnn",
    "from_flax",
    "from_nnx",
    "frozen",
    "gru",
    "lenet",
    "lenet_groupnorm",
    "lora",
    "minilm_classifier",
    "mlp",
    "resnet20",
    "transformer",
    "with_precision",
    "with_weights",
]

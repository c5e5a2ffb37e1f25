"""Networks as pure functions."""

from jaxfl.models.frozen import frozen
from jaxfl.models.lora import lora
from jaxfl.models.precision import with_precision
from jaxfl.models.wrap import from_flax, from_nnx
from jaxfl.models.zoo import build, digits_cnn, feddpa_cnn, lenet, lenet_groupnorm, mlp, resnet20

__all__ = [
    "build",
    "digits_cnn",
    "feddpa_cnn",
    "from_flax",
    "from_nnx",
    "frozen",
    "lenet",
    "lenet_groupnorm",
    "lora",
    "mlp",
    "resnet20",
    "with_precision",
]

"""Networks as pure functions."""

from jaxfl.models.zoo import build, digits_cnn, feddpa_cnn, lenet, mlp

__all__ = ["build", "digits_cnn", "feddpa_cnn", "lenet", "mlp"]

"""Convolutions, pooling and normalisation with differentiation rules of their own."""

# `kernels.fused` imports Pallas, which takes long. Its limit is known without this import.
LARGEST_FUSED = 9
"""Largest side of a kernel that `kernels.fused` takes. It decides the margins of the maps there."""

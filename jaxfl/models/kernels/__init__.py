"""Convolutions, pooling and normalisation with differentiation rules of their own."""

"""FedDPA: what its noise is worth, and what is left of its accuracy with noise that keeps the claim."""

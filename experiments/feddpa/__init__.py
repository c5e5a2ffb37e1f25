"""FedDPA with its published noise, and with noise that honours its claim."""

"""The public CIFAR-10 benchmark of pfl-research, with its noise and with client-level noise."""

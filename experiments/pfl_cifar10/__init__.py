"""The public CIFAR-10 benchmark of pfl-research, with its noise and with what its thousand clients would need."""

"""Methods at the same epsilons, by number of clients and of their classes."""

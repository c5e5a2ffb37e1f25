"""How rounds are executed: on which devices, in which order, in how many programs."""

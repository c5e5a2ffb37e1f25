"""DP-pFedDSU: its tables and its figure, with honest noise and as printed, and what decides them."""

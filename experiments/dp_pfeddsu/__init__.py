"""DP-pFedDSU: its tables and figure, with honest noise, and a thousand clients."""

"""DP-pFedDSU's tables and figure, with honest noise and as printed."""

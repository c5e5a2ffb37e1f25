"""Prediction of text, with the roles of plays as clients."""

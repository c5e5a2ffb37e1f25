"""Text: clients are the roles of plays."""

"""The command `jaxfl`, and what it runs."""

"""Benchmarks, which configure JAX as users are advised to."""

import jaxfl

jaxfl.configure()

"""Methods on networks of devices, one module each.

Most have a `make` that gives an `Operator`; a few are plain functions or steps, and
some with more state give a `System` for `networks.run`. Run operators with
`operators.run`, `asynchronous.run`, or their `operators.step` with
`iterate.iterate_until`. All start anywhere; the book starts at 0. Nothing in a method
asks for concrete values of alpha, rates or edge weights, so sweeps over them are one
`jax.vmap`.
"""

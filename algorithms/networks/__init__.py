"""Methods on networks of devices, one module each; `make` gives an `Operator`.

Run them with `network.run`, `asynchronous.run`, or their
`network.step` with `iterate.iterate_until`. All start anywhere;
the book starts at 0. Nothing in a method asks for concrete values of alpha, rates or
edge weights, so sweeps over them are one `jax.vmap`.
"""

"""Random numbers from keys: names and signatures of ``jax.random``, on a counter-based generator.

A key is a plain uint32 array of two words. The same key gives the same numbers, eagerly and traced,
under ``vmap`` and on every device; a new use needs a new key, by ``split`` or ``fold_in``. All bits
are words of Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011), so the numbers are not those of JAX. Any element is computed by itself from the
key and its position: random arrays, masks and shuffled orders need not be stored.
"""

from __future__ import annotations

from trainkernel.random.continuous import (
    cauchy,
    exponential,
    gumbel,
    laplace,
    logistic,
    normal,
    truncated_normal,
    uniform,
)
from trainkernel.random.discrete import bernoulli, categorical, choice, dropout, rademacher, randint
from trainkernel.random.keys import PRNGKey, bits, fold_in, key, split
from trainkernel.random.shuffle import permutation, shuffled_batch, shuffled_index

__all__ = [
    "PRNGKey",
    "bernoulli",
    "bits",
    "categorical",
    "cauchy",
    "choice",
    "dropout",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "laplace",
    "logistic",
    "normal",
    "permutation",
    "rademacher",
    "randint",
    "shuffled_batch",
    "shuffled_index",
    "split",
    "truncated_normal",
    "uniform",
]

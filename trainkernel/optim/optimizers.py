"""Optimizers: chains of transformations, with optax's names and arguments.

A learning rate is a number, a scalar array that may be traced, or a schedule.
"""

from __future__ import annotations

import functools
from typing import Any

from trainkernel.optim.adaptive import scale_by_adamax, scale_by_amsgrad, scale_by_belief, scale_by_radam
from trainkernel.optim.base import GradientTransformation, chain, identity
from trainkernel.optim.moments import trace
from trainkernel.optim.scaling import (
    ScalarOrSchedule,
    add_decayed_weights,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_rms,
    scale_by_rss,
    scale_by_stddev,
    scale_by_trust_ratio,
)


def sgd(
    learning_rate: ScalarOrSchedule, momentum: Any = None, nesterov: bool = False, accumulator_dtype: Any = None
) -> GradientTransformation:
    """Stochastic gradient descent, with momentum if it is given; see ``trace``."""
    moved = identity() if momentum is None else trace(momentum, nesterov, accumulator_dtype)
    return chain(moved, scale_by_learning_rate(learning_rate))


def adam(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam (Kingma and Ba, ICLR 2015); see ``scale_by_adam``."""
    adaptive = scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return chain(adaptive, scale_by_learning_rate(learning_rate))


nadam = functools.partial(adam, nesterov=True)


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam with weight decay beside it (Loshchilov and Hutter, ICLR 2019).

    The decay of a step is ``learning_rate * weight_decay`` times the parameters.
    """
    adaptive = scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return chain(adaptive, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))


nadamw = functools.partial(adamw, nesterov=True)


def lamb(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-6,
    eps_root: Any = 0.0,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Any = None,
) -> GradientTransformation:
    """LAMB: Adam with a trust ratio for each array (You et al., ICLR 2020)."""
    return chain(
        scale_by_adam(b1, b2, eps, eps_root),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )


def lion(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.99,
    mu_dtype: Any = None,
    weight_decay: ScalarOrSchedule = 1e-3,
    mask: Any = None,
) -> GradientTransformation:
    """Lion: the sign of a momentum (Chen et al., 2023); see ``scale_by_lion``."""
    return chain(
        scale_by_lion(b1, b2, mu_dtype),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def adagrad(
    learning_rate: ScalarOrSchedule, initial_accumulator_value: float = 0.1, eps: Any = 1e-7
) -> GradientTransformation:
    """Adagrad (Duchi, Hazan and Singer, JMLR 2011); see ``scale_by_rss``."""
    return chain(scale_by_rss(initial_accumulator_value, eps), scale_by_learning_rate(learning_rate))


def rmsprop(
    learning_rate: ScalarOrSchedule,
    decay: Any = 0.9,
    eps: Any = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: Any = None,
    nesterov: bool = False,
    bias_correction: bool = False,
) -> GradientTransformation:
    """RMSProp (Hinton, 2012), centred (Graves, 2013) and with momentum if asked for; see ``scale_by_rms``."""
    adaptive = scale_by_stddev if centered else scale_by_rms
    return chain(
        adaptive(decay, eps, initial_scale, eps_in_sqrt, bias_correction),
        scale_by_learning_rate(learning_rate),
        identity() if momentum is None else trace(momentum, nesterov),
    )


def adabelief(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-16,
    eps_root: Any = 1e-16,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """AdaBelief (Zhuang et al., NeurIPS 2020); see ``scale_by_belief``."""
    return chain(scale_by_belief(b1, b2, eps, eps_root, nesterov=nesterov), scale_by_learning_rate(learning_rate))


def adamax(learning_rate: ScalarOrSchedule, b1: Any = 0.9, b2: Any = 0.999, eps: Any = 1e-8) -> GradientTransformation:
    """AdaMax (Kingma and Ba, ICLR 2015); see ``scale_by_adamax``."""
    return chain(scale_by_adamax(b1, b2, eps), scale_by_learning_rate(learning_rate))


def adamaxw(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: Any = None,
) -> GradientTransformation:
    """AdaMax with weight decay beside it."""
    return chain(
        scale_by_adamax(b1, b2, eps), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )


def amsgrad(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    bias_correction_mu: bool = True,
    bias_correction_nu: bool = True,
) -> GradientTransformation:
    """AMSGrad (Reddi, Kale and Kumar, ICLR 2018); see ``scale_by_amsgrad``."""
    adaptive = scale_by_amsgrad(b1, b2, eps, eps_root, mu_dtype, bias_correction_mu, bias_correction_nu)
    return chain(adaptive, scale_by_learning_rate(learning_rate))


def radam(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    threshold: Any = 5.0,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """RAdam (Liu et al., ICLR 2020); see ``scale_by_radam``."""
    adaptive = scale_by_radam(b1, b2, eps, eps_root, threshold, nesterov=nesterov)
    return chain(adaptive, scale_by_learning_rate(learning_rate))

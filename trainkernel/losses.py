"""Losses: names, signatures and defaults of optax. Each gives a loss for each example."""

from __future__ import annotations

from typing import Any

from trainkernel import nn
from trainkernel import numpy as tnp
from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import one_axis
from trainkernel.promotion import inexact, is_integer
from trainkernel.trace import as_value, at_user_line, aval_of

Value = Any
Axes = Any

__all__ = [
    "convex_kl_divergence", "cosine_distance", "cosine_similarity", "hinge_loss", "huber_loss", "kl_divergence",
    "l2_loss", "log_cosh", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "smooth_labels",
    "softmax_cross_entropy", "softmax_cross_entropy_with_integer_labels", "squared_error",
]  # fmt: skip


# ---------------------------------------------------------------------------- regression


def _difference(predictions: Value, targets: Value | None) -> Value:
    """Errors; shapes have to agree, since a broadcast loss is an accident."""
    first = b.as_array(predictions)
    first = b.cast(first, inexact(aval_of(first).dtype))
    if targets is None:
        return first
    second = b.as_array(targets)
    if tuple(first.shape) != tuple(second.shape):
        raise TraceError(
            f"predictions of shape {list(first.shape)} and targets of shape {list(second.shape)} differ{at_user_line()}"
        )
    return tnp.subtract(first, second)


def squared_error(predictions: Value, targets: Value | None = None) -> Value:
    """``(predictions - targets)²``."""
    return tnp.square(_difference(predictions, targets))


def l2_loss(predictions: Value, targets: Value | None = None) -> Value:
    """``0.5 * (predictions - targets)²``."""
    return tnp.multiply(squared_error(predictions, targets), 0.5)


def huber_loss(predictions: Value, targets: Value | None = None, delta: float = 1.0) -> Value:
    """Quadratic for errors up to ``delta``, linear beyond (Huber, 1964)."""
    error = tnp.abs(_difference(predictions, targets))
    quadratic = tnp.minimum(error, delta)
    return tnp.add(tnp.multiply(0.5, tnp.square(quadratic)), tnp.multiply(delta, tnp.subtract(error, quadratic)))


def log_cosh(predictions: Value, targets: Value | None = None) -> Value:
    """``log(cosh(predictions - targets))``."""
    error = _difference(predictions, targets)
    return tnp.subtract(tnp.logaddexp(error, tnp.negative(error)), 0.6931471805599453)


def hinge_loss(predictor_outputs: Value, targets: Value) -> Value:
    """``max(0, 1 - outputs * targets)`` for targets -1 and 1."""
    return tnp.maximum(0, tnp.subtract(1, tnp.multiply(predictor_outputs, targets)))


def cosine_similarity(predictions: Value, targets: Value, epsilon: float = 0.0, axis: Axes = -1) -> Value:
    """The cosine of the angle between vectors along an axis; norms are at least ``epsilon``."""
    first, second = b.as_array(predictions), b.as_array(targets)
    units = [tnp.divide(x, tnp.maximum(tnp.linalg.norm(x, axis=axis, keepdims=True), epsilon)) for x in (first, second)]
    return tnp.sum(tnp.multiply(*units), axis)


def cosine_distance(predictions: Value, targets: Value, epsilon: float = 0.0, axis: Axes = -1) -> Value:
    """One minus ``cosine_similarity``."""
    return tnp.subtract(1.0, cosine_similarity(predictions, targets, epsilon, axis))


# ---------------------------------------------------------------------------- classification


def softmax_cross_entropy(logits: Value, labels: Value, axis: Axes = -1, where: Value | None = None) -> Value:
    """``-sum(labels * log_softmax(logits))`` along axes, for labels that are probabilities.

    Raises
    ------
    TraceError
        If the labels are class numbers: integers with a dim less than the logits.
    """
    wanted = aval_of(as_value(labels))
    if is_integer(wanted.dtype) and len(wanted.shape) == len(aval_of(as_value(logits)).shape) - 1:
        raise TraceError(
            f"softmax_cross_entropy needs a probability for each class, got {wanted}: use "
            f"softmax_cross_entropy_with_integer_labels, or nn.one_hot{at_user_line()}"
        )
    weighted = tnp.multiply(labels, nn.log_softmax(logits, axis, where))
    return tnp.negative(tnp.sum(weighted, axis, where=where))


def softmax_cross_entropy_with_integer_labels(
    logits: Value, labels: Value, axis: int = -1, where: Value | None = None
) -> Value:
    """``-log_softmax(logits)`` at the label along an axis.

    Parameters
    ----------
    logits : array
    labels : integer array
        Of the shape of ``logits`` without the axis. A label out of range adds nothing: the loss is
        then ``logsumexp(logits)``.
    axis : int
    where : array, optional
        Classes that count.

    Raises
    ------
    TraceError
        If the labels are no integers or their shape does not fit.
    """
    scores, index = b.as_array(logits), b.as_array(labels)
    scores = b.cast(scores, inexact(aval_of(scores).dtype))
    along = one_axis(axis, len(scores.shape), "softmax_cross_entropy_with_integer_labels")
    if not is_integer(aval_of(index).dtype):
        raise TraceError(f"labels must be integers, got {aval_of(index)}{at_user_line()}")
    shape = tuple(scores.shape)
    rest = shape[:along] + shape[along + 1 :]
    if tuple(index.shape) != rest:
        raise TraceError(
            f"logits of shape {list(shape)} need labels of shape {list(rest)}, got {list(index.shape)}{at_user_line()}"
        )
    classes = b.broadcast(b.iota(shape[along], index.dtype), shape, (along,))
    own = b.broadcast(index, shape, [dim for dim in range(len(shape)) if dim != along])
    of_label = b.sum(b.where(b.compare(classes, own, "eq"), scores, 0), dims=(along,))
    return b.sub(nn.logsumexp(scores, along, where=where), of_label)


def sigmoid_binary_cross_entropy(logits: Value, labels: Value) -> Value:
    """``-labels * log_sigmoid(logits) - (1 - labels) * log_sigmoid(-logits)``."""
    target = b.as_array(labels)
    target = b.cast(target, inexact(aval_of(target).dtype))
    positive = tnp.multiply(target, nn.log_sigmoid(logits))
    negative = tnp.multiply(tnp.subtract(1.0, target), nn.log_sigmoid(tnp.negative(logits)))
    return tnp.subtract(tnp.negative(positive), negative)


def sigmoid_focal_loss(logits: Value, labels: Value, alpha: float | None = None, gamma: float = 2.0) -> Value:
    """Binary cross entropy times ``(1 - p)^gamma`` of the right class (Lin et al., 2017)."""
    target = b.as_array(labels)
    target = b.cast(target, inexact(aval_of(target).dtype))
    probability = nn.sigmoid(logits)
    wrong = tnp.add(
        tnp.multiply(probability, tnp.subtract(1.0, target)), tnp.multiply(tnp.subtract(1.0, probability), target)
    )
    loss = tnp.multiply(sigmoid_binary_cross_entropy(logits, target), tnp.power(wrong, gamma))
    if alpha is None or alpha < 0:
        return loss
    weight = tnp.add(tnp.multiply(alpha, target), tnp.multiply(1.0 - alpha, tnp.subtract(1.0, target)))
    return tnp.multiply(weight, loss)


def kl_divergence(log_predictions: Value, targets: Value, axis: Axes = -1, where: Value | None = None) -> Value:
    """``sum(targets * (log(targets) - log_predictions))`` along axes; a target of 0 adds nothing."""
    target = b.as_array(targets)
    is_zero = tnp.equal(target, 0)
    log_target = tnp.log(tnp.where(is_zero, 1.0, target))
    return tnp.sum(tnp.multiply(target, tnp.subtract(log_target, log_predictions)), axis, where=where)


def convex_kl_divergence(log_predictions: Value, targets: Value, axis: Axes = -1, where: Value | None = None) -> Value:
    """``kl_divergence`` plus ``sum(exp(log_predictions) - targets)``: convex in both."""
    more = tnp.sum(tnp.subtract(tnp.exp(log_predictions), targets), axis, where=where)
    return tnp.add(kl_divergence(log_predictions, targets, axis, where), more)


def smooth_labels(labels: Value, alpha: float) -> Value:
    """Labels drawn towards the uniform distribution over the last axis by ``alpha``."""
    target = b.as_array(labels)
    return tnp.add(tnp.multiply(1.0 - alpha, target), alpha / target.shape[-1])

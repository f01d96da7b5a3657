"""``nn``, ``losses``, ``lax`` and ``windows`` against JAX, finite differences and plain NumPy."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy_cases import (
    Arg,
    Case,
    assert_batch_is_loop,
    assert_close,
    assert_derivatives,
    assert_emulated,
    assert_jaxs,
    call_of,
    case,
    chunks,
    draw,
    traced,
)

import trainkernel.numpy as tnp
from trainkernel import lax, losses, nn, windows
from trainkernel.errors import TraceError

X, ROWS = (3, 4), (2, 3, 4)
BOOL = Arg(X, "bool")
LABELS = Arg((3,), "int32", 0, 4)
SHARES = Arg(X, "float32", 0.1, 1.0)
OWN = SimpleNamespace(nn=nn, np=tnp, lax=lax)

ACTIVATIONS = tuple(
    case(name, lambda m, x, name=name: getattr(m.nn, name)(x), X)
    for name in [
        "relu",
        "relu6",
        "identity",
        "leaky_relu",
        "elu",
        "selu",
        "celu",
        "silu",
        "swish",
        "gelu",
        "sigmoid",
        "softplus",
        "soft_sign",
        "tanh",
        "log_sigmoid",
        "hard_tanh",
        "hard_sigmoid",
        "hard_silu",
        "glu",
        "squareplus",
        "sparse_plus",
        "mish",
        "softmax",
        "log_softmax",
        "logsumexp",
        "logmeanexp",
        "standardize",
    ]
)

NN = (
    *ACTIVATIONS,
    case("log1mexp", lambda m, x: m.nn.log1mexp(x), Arg(X, "float32", 0.05, 4)),
    case("log1mexp far", lambda m, x: m.nn.log1mexp(x), Arg(X, "float32", -1, 90), is_smooth=False),
    case("relu6 above", lambda m, x: m.nn.relu6(x), Arg(X, "float32", 4, 8)),
    case("gelu exact", lambda m, x: m.nn.gelu(x, approximate=False), X),
    case("elu with alpha", lambda m, x: m.nn.elu(x, 0.5), X),
    case("celu with alpha", lambda m, x: m.nn.celu(x, 2.0), X),
    case("glu of the first axis", lambda m, x: m.nn.glu(x, axis=0), (4, 3)),
    case("softmax of the first axis", lambda m, x: m.nn.softmax(x, axis=0), X),
    case("softmax of two axes", lambda m, x: m.nn.softmax(x, axis=(0, 2)), ROWS),
    case("softmax of large numbers", lambda m, x: m.nn.softmax(x * 1e4), X),
    case("softmax where", lambda m, x: m.nn.softmax(x, where=np.array([True, False, True, True])), X),
    case(
        "softmax of -inf", lambda m, x, c: m.nn.softmax(m.np.where(c, x, -m.np.inf)), (3, 4), Arg((4,), "bool", -2, 1)
    ),
    case(
        "log_softmax where",
        lambda m, x: m.nn.log_softmax(x, where=np.array([True, False, True, True])),
        X,
        is_smooth=False,
    ),
    case("logsumexp of an axis", lambda m, x: m.nn.logsumexp(x, axis=1, keepdims=True), X),
    case("logsumexp with factors", lambda m, x, f: m.nn.logsumexp(x, axis=1, b=m.np.abs(f)), X, X),
    case(
        "logsumexp with signs",
        lambda m, x, f: m.nn.logsumexp(x * 99, b=f, axis=0, keepdims=True, return_sign=True)[0],
        X,
        X,
        atol=1e-4,
    ),
    case("standardize two axes", lambda m, x: m.nn.standardize(x, axis=(1, 2)), ROWS, atol=1e-5),
    case("one_hot", lambda m, i: m.nn.one_hot(i, 4), Arg(X, "int32", -1, 6), is_smooth=False),
    case(
        "one_hot in front",
        lambda m, i: m.nn.one_hot(i, 3, axis=0, dtype="int32"),
        Arg((5,), "int32", 0, 3),
        is_smooth=False,
    ),
    case("attention", lambda m, q, k, v: m.nn.dot_product_attention(q, k, v), (2, 3, 4, 5), (2, 6, 4, 5), (2, 6, 4, 5)),
    case(
        "causal attention", lambda m, q, k, v: m.nn.dot_product_attention(q, k, v, is_causal=True), *((2, 4, 2, 5),) * 3
    ),
    case(
        "grouped attention",
        lambda m, q, k, v: m.nn.dot_product_attention(q, k, v, scale=0.3),
        (2, 3, 4, 5),
        (2, 3, 2, 5),
        (2, 3, 2, 5),
    ),
    case("attention without a batch", lambda m, q, k, v: m.nn.dot_product_attention(q, k, v), *((3, 2, 5),) * 3),
    case(
        "masked attention",
        lambda m, q, k, v, bias: m.nn.dot_product_attention(q, k, v, bias, np.tri(3, 6, 3, dtype=bool)[None, None]),
        (2, 3, 2, 5),
        (2, 6, 2, 5),
        (2, 6, 2, 5),
        (1, 2, 3, 6),
    ),
)


def conv(name: str, x: Any, w: Any, strides: Any, padding: Any, **options: Any) -> Case:
    def call(m: Any, lhs: Any, rhs: Any) -> Any:
        return m.lax.conv_general_dilated(lhs, rhs, strides, padding, **options)

    return case(f"conv {name}", call, x, w, atol=2e-5)


NHWC = ("NHWC", "HWIO", "NHWC")
LAX = (
    conv("1-D", (2, 3, 9), (4, 3, 3), (1,), "VALID"),
    conv("1-D NWC", (2, 9, 3), (3, 3, 4), (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
    conv("2-D", (2, 3, 6, 7), (4, 3, 3, 2), (1, 1), "SAME"),
    conv("2-D NHWC", (2, 6, 7, 3), (3, 3, 3, 4), (2, 2), "SAME", dimension_numbers=NHWC),
    conv("same lower", (2, 6, 7, 3), (2, 4, 3, 4), (2, 1), "SAME_LOWER", dimension_numbers=NHWC),
    conv("1 × 1", (2, 5, 4, 3), (1, 1, 3, 4), (1, 1), "VALID", dimension_numbers=NHWC),
    conv("1 × 1 strided", (2, 5, 4, 3), (1, 1, 3, 4), (2, 2), "VALID", dimension_numbers=NHWC),
    conv("patches", (2, 7, 8, 3), (2, 4, 3, 5), (2, 4), "VALID", dimension_numbers=NHWC),
    conv("padded", (2, 5, 4, 3), (3, 3, 3, 4), (1, 2), ((2, 0), (1, 3)), dimension_numbers=NHWC),
    conv("negative padding", (1, 1, 8), (1, 1, 2), (1,), ((-1, -2),)),
    conv("dilated", (2, 3, 9, 8), (4, 3, 3, 2), (1, 2), "SAME", rhs_dilation=(2, 3)),
    conv("transposed", (2, 3, 4, 4), (4, 3, 3, 3), (1, 1), ((2, 2), (2, 2)), lhs_dilation=(2, 2)),
    conv("grouped", (2, 4, 5, 5), (6, 2, 3, 3), (1, 1), "SAME", feature_group_count=2),
    conv("depthwise", (2, 5, 5, 3), (3, 3, 1, 6), (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=3),
    conv("mixed layouts", (6, 3, 5, 2), (4, 3, 3, 3), (1, 1), "SAME", dimension_numbers=("HCWN", "OIHW", "NCHW")),
    conv("3-D", (1, 2, 4, 5, 3), (3, 2, 2, 3, 2), (1, 2, 1), "SAME"),
    case("rsqrt", lambda m, x: m.lax.rsqrt(x), SHARES, atol=1e-5),
    case("erf", lambda m, x: m.lax.erf(x), X),
    case("cumsum reversed", lambda m, x: m.lax.cumsum(x, axis=1, reverse=True), X),
    case("cumprod reversed", lambda m, x: m.lax.cumprod(x, axis=1, reverse=True), X),
    case("cummax", lambda m, x: m.lax.cummax(x, axis=1), (3, 6)),
    case("cummin of ints", lambda m, x: m.lax.cummin(x, axis=0), Arg((7, 2), "int32", -9, 9), is_smooth=False),
    case("top_k", lambda m, x: m.lax.top_k(x, 3), (3, 7)),
    case("top_k axis", lambda m, x: m.lax.top_k(x, 2, axis=0)[0], (5, 3)),
    case("top_k of ties", lambda m, x: m.lax.top_k(m.np.round(m.np.abs(x)), 4), (3, 7), is_smooth=False),
    case("top_k of ints", lambda m, x: m.lax.top_k(x, 4), Arg((3, 7), "int32", -3, 4), is_smooth=False),
    case("top_k of words", lambda m, x: m.lax.top_k(x, 7), Arg((7,), "uint32", 0, 4e9), is_smooth=False),
    case("top_k none", lambda m, x: m.lax.top_k(x, 0)[0], (3, 7)),
    case("sort", lambda m, x: m.lax.sort(x, 0), (5, 3)),
    case("sort together", lambda m, x, y: m.lax.sort((m.np.round(x), y), num_keys=2), (3, 7), (3, 7), is_smooth=False),
    case("sort_key_val", lambda m, x, y: m.lax.sort_key_val(x, y), (3, 7), (3, 7)),
    case("select_n", lambda m, i, x, y, z: m.lax.select_n(i, x, y, z), Arg(X, "int32", 0, 3), X, X, X),
    case("select_n of bools", lambda m, x, y: m.lax.select_n(x > y, x, y), X, X),
    case("select_n of one number", lambda m, i, x, y: m.lax.select_n(i, x, y), Arg((), "int32", 0, 2), X, X),
    case("arcs", lambda m, x: [getattr(m.lax, f)(x) for f in ("asin", "acos", "atan", "asinh", "atanh")], SHARES),
    case("arcs of pairs", lambda m, x, y: (m.lax.atan2(x, y), m.lax.acosh(x + 1), m.lax.cbrt(y)), SHARES, SHARES),
    case("associative_scan", lambda m, x: m.lax.associative_scan(m.np.add, x), (7, 2)),
    case(
        "associative_scan of pairs",
        lambda m, a, c: m.lax.associative_scan(lambda x, y: (y[0] * x[0], y[0] * x[1] + y[1]), (a, c), axis=1),
        (2, 6),
        (2, 6),
        atol=2e-5,
    ),
    case(
        "associative_scan reversed",
        lambda m, a, c: m.lax.associative_scan(lambda x, y: (y[0] * x[0], y[0] * x[1] + y[1]), (a, c), reverse=True),
        (5,),
        (5,),
        atol=2e-5,
    ),
    case("pad", lambda m, x: m.lax.pad(x, 0.5, ((1, -1, 1), (-2, 2, 0))), X),
    case("rev", lambda m, x: m.lax.rev(x, (0, 1)), X),
    case("clamp", lambda m, x: m.lax.clamp(-0.5, x, 1.0), X),
    case("logistic", lambda m, x: m.lax.logistic(x), X),
    case("integer_pow", lambda m, x: m.lax.integer_pow(x, 5), X, atol=1e-5),
    case("iota", lambda m: m.lax.iota("int32", 5), is_smooth=False),
    case("broadcasted_iota", lambda m: m.lax.broadcasted_iota("int32", (2, 3), 1), is_smooth=False),
    case("broadcast_in_dim", lambda m, x: m.lax.broadcast_in_dim(x, (4, 3, 2), (1,)), (3,)),
    case("slice", lambda m, x: m.lax.slice(x, (1, 0), (3, 4), (1, 2)), X),
    case("slice_in_dim", lambda m, x: m.lax.slice_in_dim(x, 1, 4, 2, axis=1), X),
    case("dot_general", lambda m, x, y: m.lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))), ROWS, (2, 4, 5)),
    case(
        "dynamic_slice",
        lambda m, x, i, j: m.lax.dynamic_slice(x, (i, j), (2, 2)),
        X,
        Arg((), "int32", -5, 5),
        Arg((), "int32", -5, 5),
    ),
    case(
        "dynamic_slice_in_dim", lambda m, x, i: m.lax.dynamic_slice_in_dim(x, i, 2, axis=1), X, Arg((), "int32", 0, 4)
    ),
    case(
        "dynamic_index_in_dim",
        lambda m, x, i: m.lax.dynamic_index_in_dim(x, i, 1, keepdims=False),
        X,
        Arg((), "int32", 0, 4),
    ),
    case(
        "dynamic_update_slice",
        lambda m, x, y, i: m.lax.dynamic_update_slice(x, y, (i, 1)),
        X,
        (2, 2),
        Arg((), "int32", -3, 5),
    ),
    case(
        "dynamic_update_index",
        lambda m, x, y, i: m.lax.dynamic_update_index_in_dim(x, y, i, 1),
        X,
        (3,),
        Arg((), "int32", 0, 4),
    ),
)

CASES = {each.name: each for each in (*NN, *LAX)}
SMOOTH = {name: each for name, each in CASES.items() if each.is_smooth}


@pytest.mark.parametrize("cases", chunks(CASES.values()), ids=lambda cases: cases[0].name)
def test_values_and_gradients_are_jaxs(cases: list[Case]) -> None:
    jax = pytest.importorskip("jax")
    assert_jaxs(cases, OWN, SimpleNamespace(nn=jax.nn, np=jax.numpy, lax=jax.lax), tnp)


@pytest.mark.parametrize("name", CASES)
def test_traced_is_eager(name: str) -> None:
    each = CASES[name]
    arrays = draw(each.args, name)
    assert_close(traced(call_of(each, OWN), arrays), each.call(OWN, *arrays), 1e-6)


@pytest.mark.parametrize("cases", chunks(CASES.values()), ids=lambda cases: cases[0].name)
def test_the_emitted_source_computes_it(cases: list[Case]) -> None:
    assert_emulated(cases, OWN, tnp)


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_are_finite_differences(name: str) -> None:
    each = SMOOTH[name]
    assert_derivatives(call_of(each, OWN), draw(each.args, name, "float64"), tnp)


@pytest.mark.parametrize("name", [name for name, each in CASES.items() if each.args])
def test_a_batch_is_a_loop(name: str) -> None:
    each = CASES[name]
    assert_batch_is_loop(
        call_of(each, OWN), [draw(each.args, f"{name} {row}") for row in range(3)], max(each.atol, 1e-5)
    )


# ---------------------------------------------------------------------------- normalization and losses

LOSSES = (
    case("layer_norm", lambda m, x, s, t: nn.layer_norm(x, s, t), X, (4,), (4,)),
    case("rms_norm", lambda m, x, s: nn.rms_norm(x, s), X, (4,)),
    case("squared_error", lambda m, x, y: losses.squared_error(x, y), X, X),
    case("l2_loss", lambda m, x, y: losses.l2_loss(x, y), X, X),
    case("huber_loss", lambda m, x, y: losses.huber_loss(x, y, 0.7), X, X),
    case("log_cosh", lambda m, x, y: losses.log_cosh(x, y), X, X),
    case("hinge_loss", lambda m, x: losses.hinge_loss(x, np.float32(1)), X),
    case("cosine_similarity", lambda m, x, y: losses.cosine_similarity(x, y), X, X),
    case("cosine_distance", lambda m, x, y: losses.cosine_distance(x, y, 1e-3, axis=0), X, X),
    case("softmax_cross_entropy", lambda m, x, y: losses.softmax_cross_entropy(x, y), X, SHARES),
    case("integer labels", lambda m, x, y: losses.softmax_cross_entropy_with_integer_labels(x, y), X, LABELS),
    case("sigmoid_binary_cross_entropy", lambda m, x, y: losses.sigmoid_binary_cross_entropy(x, y), X, SHARES),
    case("sigmoid_focal_loss", lambda m, x, y: losses.sigmoid_focal_loss(x, y, 0.3), X, SHARES),
    case("kl_divergence", lambda m, x, y: losses.kl_divergence(x, y), X, SHARES),
    case("convex_kl_divergence", lambda m, x, y: losses.convex_kl_divergence(x, y), X, SHARES),
    case("smooth_labels", lambda m, y: losses.smooth_labels(y, 0.1), SHARES),
    case("max_pool", lambda m, x: windows.max_pool(x, (2, 3), (1, 2), "SAME"), (2, 5, 6, 3)),
    case("max_pool touching", lambda m, x: windows.max_pool(x, (2, 2), (2, 2)), (2, 5, 6, 3)),
    case("avg_pool", lambda m, x: windows.avg_pool(x, (3,), (2,), "SAME"), (2, 5, 3)),
    case(
        "avg_pool without padding",
        lambda m, x: windows.avg_pool(x, (3, 2), padding="SAME", count_include_pad=False),
        (5, 4, 3),
    ),
)


@pytest.mark.parametrize("each", LOSSES, ids=lambda each: each.name)
def test_losses_traced_differentiated_and_batched(each: Case) -> None:
    function = call_of(each, OWN)
    arrays = draw(each.args, each.name)
    assert_close(traced(function, arrays), function(*arrays), 1e-6)
    assert_derivatives(function, draw(each.args, each.name, "float64"), tnp)
    assert_batch_is_loop(function, [draw(each.args, f"{each.name} {row}") for row in range(3)], 1e-5)


def test_norms_and_losses_are_their_formulas() -> None:
    x, y, scale = draw((Arg((3, 4)), Arg((3, 4)), Arg((4,))), "formulas")
    centered = x - x.mean(-1, keepdims=True)
    normal = centered / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(nn.layer_norm(x, scale, 1.0), normal * scale + 1, rtol=1e-5, atol=1e-6)
    root = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(nn.rms_norm(x, scale), x / root * scale, rtol=1e-5)
    logs = x - np.log(np.exp(x).sum(-1, keepdims=True))
    picked = -logs[np.arange(3), [3, 0, 2]]
    labels = np.array([3, 0, 2])
    np.testing.assert_allclose(losses.softmax_cross_entropy_with_integer_labels(x, labels), picked, rtol=1e-5)
    one_hot = nn.one_hot(labels, 4)
    np.testing.assert_allclose(losses.softmax_cross_entropy(x, one_hot), picked, rtol=1e-5)
    p = 1 / (1 + np.exp(-x))
    binary = -y * np.log(p) - (1 - y) * np.log(1 - p)
    np.testing.assert_allclose(losses.sigmoid_binary_cross_entropy(x, y), binary, rtol=1e-5, atol=1e-6)
    error = np.abs(x - y)
    huber = np.where(error <= 0.7, 0.5 * error**2, 0.7 * (error - 0.35))
    np.testing.assert_allclose(losses.huber_loss(x, y, 0.7), huber, rtol=1e-5, atol=1e-6)


def test_16_bit_floats_keep_their_dtype() -> None:
    x = draw((Arg((3, 4)),), "16 bit")[0]
    for dtype in ("float16", "bfloat16"):
        low = tnp.astype(x, dtype)
        for function in (nn.gelu, nn.softmax, nn.silu, nn.layer_norm, nn.rms_norm, nn.logsumexp, tnp.mean, tnp.var):
            assert function(low).dtype == low.dtype
        assert tnp.matmul(low, low.T).dtype == low.dtype
        assert traced(lambda v: v / tnp.sqrt(64) + tnp.where(v > 0, 0.0, -math.inf), [low]).dtype == low.dtype


def test_pools_are_those_of_plain_loops() -> None:
    x = draw((Arg((1, 6, 7, 2)),), "pool")[0]
    largest = np.stack([x[:, i : i + 2, j : j + 3].max((1, 2)) for i in range(0, 5, 2) for j in range(5)], 1)
    np.testing.assert_array_equal(windows.max_pool(x, (2, 3), (2, 1)).reshape(1, 15, 2), largest)
    means = np.stack([x[:, i : i + 2, j : j + 3].mean((1, 2)) for i in range(5) for j in range(5)], 1)
    np.testing.assert_allclose(windows.avg_pool(x, (2, 3)).reshape(1, 25, 2), means, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: nn.glu(x[:, :3]), "glu needs an even size.*3, 3"),
        (lambda x: nn.dot_product_attention(x, x, x), "query.*3, 4.*do not fit"),
        (lambda x: losses.squared_error(x, x[0]), r"\[3, 4\] and targets of shape \[4\]"),
        (
            lambda x: losses.softmax_cross_entropy_with_integer_labels(x, np.zeros(4, np.int32)),
            r"\[3, 4\].*\[3\].*\[4\]",
        ),
        (lambda x: losses.softmax_cross_entropy_with_integer_labels(x, x[:, 0]), "labels must be integers"),
        (lambda x: lax.dynamic_slice(x, (0, 0), (4, 4)), r"\[4, 4\] does not fit shape \[3, 4\]"),
        (lambda x: lax.conv_general_dilated(x[None], x[None, :2], (1,), "VALID"), "3 channels in 1 groups"),
        (lambda x: lax.conv_general_dilated(x[None], x[None], (1,), "valid?"), "padding must be.*valid?"),
    ],
)
def test_errors_name_shapes_and_the_line(call: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        traced(call, [np.zeros((3, 4), np.float32)])
    assert "test_nn.py" in str(caught.value)

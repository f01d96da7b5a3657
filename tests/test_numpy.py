"""``trainkernel.numpy`` against NumPy and JAX: values and dtypes eagerly and traced, derivatives, batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy_cases import Arg, Case, assert_close, batched, case, draw, flat, gradient, scalar_of, traced

import trainkernel.numpy as tnp
from trainkernel import batching, derivatives
from trainkernel.jitted import jit

INT = Arg((3, 4), "int32", -5, 6)
BOOL = Arg((3, 4), "bool")
POSITIVE = Arg((3, 4), "float32", 0.1, 3.0)
X, V = (3, 4), (5,)

ELEMENTWISE = (
    case("exp", lambda m, x: m.exp(x), X),
    case("exp2", lambda m, x: m.exp2(x), X),
    case("expm1", lambda m, x: m.expm1(x), X),
    case("log", lambda m, x: m.log(x), POSITIVE),
    case("log2", lambda m, x: m.log2(x), POSITIVE),
    case("log10", lambda m, x: m.log10(x), POSITIVE),
    case("log1p", lambda m, x: m.log1p(x), POSITIVE),
    case("sqrt", lambda m, x: m.sqrt(x), POSITIVE),
    case("square", lambda m, x: m.square(x), X),
    case("reciprocal", lambda m, x: m.reciprocal(x), POSITIVE),
    case("tanh", lambda m, x: m.tanh(x), X),
    case("sinh", lambda m, x: m.sinh(x), X),
    case("sinh large", lambda m, x: m.sinh(x), Arg((6,), "float32", -60, 60), atol=1e-5, is_smooth=False),
    case("cosh", lambda m, x: m.cosh(x), X),
    case("arctanh", lambda m, x: m.arctanh(x), Arg(X, "float32", -0.9, 0.9)),
    case("sin", lambda m, x: m.sin(x), X),
    case("cos", lambda m, x: m.cos(x), X),
    case("tan", lambda m, x: m.tan(x), Arg(X, "float32", -1, 1), atol=1e-5),
    case("abs", lambda m, x: m.abs(x), X),
    case("abs of ints", lambda m, x: m.abs(x), INT, is_smooth=False),
    case("fabs", lambda m, x: m.fabs(x), X),
    case("sign", lambda m, x: m.sign(x), X),
    case("floor", lambda m, x: m.floor(x), X),
    case("ceil", lambda m, x: m.ceil(x), X),
    case("rint", lambda m, x: m.rint(x), X),
    case("trunc", lambda m, x: m.trunc(x), X),
    case("fix", lambda m, x: m.fix(x), X, oracle="numpy"),
    case("round", lambda m, x: m.round(x), X),
    case("round to 2 decimals", lambda m, x: m.round(x, 2), X),
    case("floor of ints", lambda m, x: m.floor(x), INT, is_smooth=False),
    case("maximum", lambda m, x, y: m.maximum(x, y), X, (4,)),
    case("minimum", lambda m, x, y: m.minimum(x, y), X, (3, 1)),
    case("maximum of a scalar", lambda m, x: m.maximum(x, 0.5), X),
    case("fmax", lambda m, x, y: m.fmax(m.where(x > 1, m.nan, x), y), X, X, is_smooth=False),
    case("fmin", lambda m, x, y: m.fmin(x, m.where(y > 1, m.nan, y)), X, X, is_smooth=False),
    case("clip", lambda m, x: m.clip(x, -1, 1), X),
    case("clip by names", lambda m, x: m.clip(x, max=1), X),
    case("clip by arrays", lambda m, x, low: m.clip(x, low, low + 1), X, (4,)),
    case("isnan", lambda m, x: m.isnan(m.log(x)), X, is_smooth=False),
    case("isinf", lambda m, x: m.isinf(m.divide(x, 0.0)), X, is_smooth=False, oracle="jax"),
    case("isfinite", lambda m, x: m.isfinite(m.log(x)), X, is_smooth=False),
    case("isfinite of ints", lambda m, x: m.isfinite(x), INT, is_smooth=False),
    case("nan_to_num", lambda m, x: m.nan_to_num(m.log(x), nan=-3.0), X, is_smooth=False),
    case("nan_to_num infinities", lambda m, x: m.nan_to_num(m.divide(x, 0.0)), X, is_smooth=False, oracle="jax"),
    case("signbit", lambda m, x: m.signbit(m.round(x)), X, is_smooth=False),
    case("where", lambda m, c, x, y: m.where(c, x, y), BOOL, X, (4,)),
    case("where of numbers", lambda m, c: m.where(c, 1.0, 0.0), BOOL, is_smooth=False, oracle="jax"),
    case("where of ints", lambda m, c, x: m.where(c, x, 2), INT, X),
    case("select", lambda m, x: m.select([x > 1, x > 0], [x * x, -x], 7.0), X, oracle="jax"),
    case("heaviside", lambda m, x: m.heaviside(m.round(x), 0.25), X, is_smooth=False, oracle="jax"),
    case("logaddexp", lambda m, x, y: m.logaddexp(x, y), X, (4,)),
    case(
        "logaddexp infinite",
        lambda m, x: m.logaddexp(m.log(x * 0), m.log(x * 0)),
        POSITIVE,
        is_smooth=False,
        oracle="jax",
    ),
    case("hypot", lambda m, x, y: m.hypot(x, y), X, (4,)),
    case("deg2rad", lambda m, x: m.deg2rad(x), X),
    case("rad2deg", lambda m, x: m.rad2deg(x), X, atol=1e-5),
    case("isclose", lambda m, x, y: m.isclose(x, x + y * 1e-5), X, X, is_smooth=False, oracle="numpy"),
    case("allclose", lambda m, x: m.allclose(x, x + 1e-9), X, is_smooth=False, oracle="jax"),
    case("array_equal", lambda m, x: m.array_equal(x, x), X, is_smooth=False, oracle="jax"),
    case("fmod", lambda m, x, y: m.fmod(x, y), X, POSITIVE),
    case("divmod", lambda m, x, y: m.divmod(x, y), X, POSITIVE),
    case("power", lambda m, x, y: m.power(x, y), POSITIVE, X),
    case("power of a number", lambda m, y: m.power(2.5, y), X),
    case("power 3", lambda m, x: x**3, X),
    case("power -2", lambda m, x: x**-2, POSITIVE, atol=2e-5),
    case("power 0.5", lambda m, x: x**0.5, POSITIVE),
)

REDUCTIONS = (
    case("sum", lambda m, x: m.sum(x), X),
    case("sum axis", lambda m, x: m.sum(x, axis=1), (2, 3, 4)),
    case("sum axes", lambda m, x: m.sum(x, axis=(0, -1), keepdims=True), (2, 3, 4)),
    case("sum method", lambda m, x: x.sum(axis=0), X),
    case("sum of bools", lambda m, x: m.sum(x, axis=0), BOOL, is_smooth=False, oracle="jax"),
    case("sum of bytes", lambda m, x: m.sum(x), Arg(X, "uint8", 0, 255), is_smooth=False, oracle="jax"),
    case("sum where", lambda m, x, c: m.sum(x, axis=1, where=c), X, BOOL),
    case("sum initial", lambda m, x: m.sum(x, axis=1, initial=2.0), X, oracle="jax"),
    case("sum of nothing", lambda m, x: m.sum(x, axis=0), (0, 3)),
    case("prod", lambda m, x: m.prod(x, axis=1), X),
    case("mean", lambda m, x: m.mean(x, axis=0), X),
    case("mean of ints", lambda m, x: m.mean(x), INT, is_smooth=False, oracle="jax"),
    case("mean where", lambda m, x, c: m.mean(x, where=c), X, BOOL),
    case("max", lambda m, x: m.max(x, axis=1), X),
    case("max initial", lambda m, x: m.max(x, axis=1, initial=0.5), X),
    case("max where", lambda m, x, c: m.max(x, axis=1, initial=-5.0, where=c), X, BOOL),
    case("min", lambda m, x: m.min(x, keepdims=True), X),
    case("max of bools", lambda m, x: m.max(x, axis=0), BOOL, is_smooth=False),
    case("all", lambda m, x: m.all(x, axis=0), BOOL, is_smooth=False),
    case("any", lambda m, x: m.any(x > 1.5, axis=0, keepdims=True), X, is_smooth=False),
    case("any of nothing", lambda m, x: m.any(x), (0,), is_smooth=False),
    case("argmax", lambda m, x: m.argmax(x, axis=1), X, is_smooth=False, oracle="jax"),
    case("argmax flat", lambda m, x: m.argmax(m.round(x)), X, is_smooth=False, oracle="jax"),
    case("argmax of NaN", lambda m, x: m.argmax(m.log(x), axis=0), X, is_smooth=False, oracle="jax"),
    case("argmin", lambda m, x: m.argmin(m.round(x), axis=0, keepdims=True), X, is_smooth=False, oracle="jax"),
    case("count_nonzero", lambda m, x: m.count_nonzero(x, axis=0), INT, is_smooth=False, oracle="jax"),
    case("var", lambda m, x: m.var(x, axis=1), X),
    case("var ddof", lambda m, x: m.var(x, axis=(0, 1), ddof=1, keepdims=True), X),
    case("std", lambda m, x: m.std(x, axis=0), X),
    case("ptp", lambda m, x: m.ptp(x, axis=0), X),
    case("average", lambda m, x, w: m.average(x, axis=1, weights=w), X, Arg((4,), "float32", 1, 2)),
    case("nansum", lambda m, x: m.nansum(m.log(x), axis=0), X, is_smooth=False),
    case("nanmean", lambda m, x: m.nanmean(m.log(x)), X, is_smooth=False),
    case("nanmax", lambda m, x: m.nanmax(m.log(x)), X, is_smooth=False),
    case("cumsum", lambda m, x: m.cumsum(x, axis=1), X),
    case("cumsum flat", lambda m, x: m.cumsum(x), X),
    case("cumprod", lambda m, x: m.cumprod(x, axis=1), (3, 7)),
    case("diff", lambda m, x: m.diff(x, n=2, axis=0), (5, 2)),
    case("norm", lambda m, x: m.linalg.norm(x), X),
    case("norm of rows", lambda m, x: m.linalg.norm(x, axis=1, keepdims=True), X),
    case("norm 1", lambda m, x: m.linalg.norm(x, ord=1, axis=1), X),
    case("norm inf", lambda m, x: m.linalg.norm(x, ord=np.inf, axis=0), X),
    case("norm 3", lambda m, x: m.linalg.norm(x, ord=3, axis=0), X),
    case("norm of a matrix", lambda m, x: m.linalg.norm(x, ord=1), X),
    case("norm fro", lambda m, x: m.linalg.norm(x, ord="fro", axis=(1, 2)), (2, 3, 4)),
)

CREATION = (
    case("zeros", lambda m: m.zeros((2, 3)), is_smooth=False, oracle="jax"),
    case("ones", lambda m: m.ones(3, dtype="int32"), is_smooth=False),
    case("full", lambda m, x: m.full((2, 3), x), (3,)),
    case("full of a number", lambda m: m.full((2,), 1.5), is_smooth=False, oracle="jax"),
    case("zeros_like", lambda m, x: m.zeros_like(x), INT, is_smooth=False),
    case("full_like", lambda m, x: m.full_like(x, 2), X, is_smooth=False),
    case("arange", lambda m: m.arange(7), is_smooth=False, oracle="jax"),
    case("arange of ints", lambda m: m.arange(9, 2, -2), is_smooth=False, oracle="jax"),
    case("arange of floats", lambda m: m.arange(0.5, 2.0, 0.25), is_smooth=False, oracle="jax"),
    case("arange float32", lambda m: m.arange(4, dtype="float32"), is_smooth=False),
    case("linspace", lambda m: m.linspace(-1.0, 2.0, 7), is_smooth=False, oracle="jax"),
    case("linspace of arrays", lambda m, x, y: m.linspace(x, y, 5, axis=1), (3,), (3,)),
    case("linspace open", lambda m: m.linspace(0, 1, 4, endpoint=False), is_smooth=False, oracle="jax"),
    case("logspace", lambda m: m.logspace(0.0, 2.0, 5), is_smooth=False, oracle="jax", atol=1e-4),
    case("geomspace", lambda m: m.geomspace(1.0, 8.0, 4), is_smooth=False, oracle="jax", atol=1e-5),
    case("eye", lambda m: m.eye(3, 4, k=1), is_smooth=False, oracle="jax"),
    case("identity", lambda m: m.identity(2, dtype="int32"), is_smooth=False),
    case("tri", lambda m: m.tri(3, 4, -1), is_smooth=False, oracle="jax"),
    case("tril", lambda m, x: m.tril(x), (2, 3, 3)),
    case("triu", lambda m, x: m.triu(x, 1), X),
    case("meshgrid", lambda m, x, y: m.meshgrid(x, y), (3,), (4,)),
    case("meshgrid ij", lambda m, x, y: m.meshgrid(x, y, indexing="ij", sparse=True), (3,), (4,)),
    case("array of arrays", lambda m, x, y: m.array([[x[0], y[1]], [x[1], 2.0]]), V, V, oracle="jax"),
    case("array of ints", lambda m: m.array([[1, 2], [3, 4]]), is_smooth=False, oracle="jax"),
    case("array of floats", lambda m: m.asarray([1.5, 2]), is_smooth=False, oracle="jax"),
    case("astype", lambda m, x: x.astype("int32"), X, is_smooth=False),
    case("astype bool", lambda m, x: m.round(x).astype(bool), X, is_smooth=False),
)

SHAPES = (
    case("reshape", lambda m, x: m.reshape(x, (2, -1)), X),
    case("reshape method", lambda m, x: x.reshape(6, 2), X),
    case("reshape method of a tuple", lambda m, x: x.reshape((4, -1)), X),
    case("ravel", lambda m, x: m.ravel(x), X),
    case("flatten", lambda m, x: x.flatten(), X),
    case("transpose", lambda m, x: m.transpose(x, (2, 0, 1)), (2, 3, 4)),
    case("transpose method", lambda m, x: x.transpose(1, 0, 2), (2, 3, 4)),
    case("T", lambda m, x: x.T, (2, 3, 4)),
    case("mT", lambda m, x: x.mT, (2, 3, 4)),
    case("swapaxes", lambda m, x: m.swapaxes(x, 0, -1), (2, 3, 4)),
    case("moveaxis", lambda m, x: m.moveaxis(x, (0, 1), (-1, 0)), (2, 3, 4)),
    case("rollaxis", lambda m, x: m.rollaxis(x, 2), (2, 3, 4)),
    case("expand_dims", lambda m, x: m.expand_dims(x, (0, -1)), X),
    case("squeeze", lambda m, x: m.squeeze(x), (1, 3, 1)),
    case("squeeze axis", lambda m, x: x.squeeze(-1), (1, 3, 1)),
    case("broadcast_to", lambda m, x: m.broadcast_to(x, (2, 3, 4)), (3, 1)),
    case("broadcast_arrays", lambda m, x, y: m.broadcast_arrays(x, y), (3, 1), (4,)),
    case("concatenate", lambda m, x, y: m.concatenate([x, y], axis=1), (3, 2), X),
    case("concatenate flat", lambda m, x, y: m.concatenate((x, y), axis=None), (3, 2), X),
    case("concatenate dtypes", lambda m, x, y: m.concatenate([x, y]), INT, Arg((1, 4), "float32"), oracle="jax"),
    case("concatenate many", lambda m, x: m.concatenate([x[i % 3 : i % 3 + 1] for i in range(300)]), X),
    case("stack", lambda m, x, y: m.stack([x, y], axis=-1), X, X),
    case("vstack", lambda m, x, y: m.vstack([x, y]), (4,), X),
    case("hstack", lambda m, x, y: m.hstack([x, y]), X, (3, 1)),
    case("dstack", lambda m, x, y: m.dstack([x, y]), X, X),
    case("column_stack", lambda m, x, y: m.column_stack([x, y]), (3,), X),
    case("split", lambda m, x: m.split(x, 2, axis=1), X),
    case("split at", lambda m, x: m.split(x, [1, 3], axis=1), X),
    case("array_split", lambda m, x: m.array_split(x, 3), V),
    case("tile", lambda m, x: m.tile(x, (2, 1, 3)), X),
    case("repeat", lambda m, x: m.repeat(x, 3, axis=1), X),
    case("repeat flat", lambda m, x: m.repeat(x, 2), X),
    case("repeat each", lambda m, x: m.repeat(x, np.array([1, 0, 2]), axis=0), X),
    case("flip", lambda m, x: m.flip(x, 1), X),
    case("flipud", lambda m, x: m.flipud(x), X),
    case("rot90", lambda m, x: m.rot90(x), X),
    case("rot270", lambda m, x: m.rot90(x, 3), X),
    case("roll", lambda m, x: m.roll(x, 2, axis=1), X),
    case("roll flat", lambda m, x: m.roll(x, -5), X),
    case("roll axes", lambda m, x: m.roll(x, (1, 2), axis=(0, 1)), X),
    case("pad", lambda m, x: m.pad(x, ((1, 2), (0, 3))), X),
    case("pad constant", lambda m, x: m.pad(x, 1, constant_values=2.5), X),
    case("pad edge", lambda m, x: m.pad(x, ((2, 1), (0, 2)), mode="edge"), X),
    case("pad reflect", lambda m, x: m.pad(x, ((2, 5), (0, 1)), mode="reflect"), X),
    case("pad symmetric", lambda m, x: m.pad(x, 4, mode="symmetric"), X),
    case("pad wrap", lambda m, x: m.pad(x, ((0, 4), (9, 1)), mode="wrap"), X),
    case("atleast_2d", lambda m, x: m.atleast_2d(x), V),
    case("atleast_3d", lambda m, x, y: m.atleast_3d(x, y), V, X),
    case("diagonal", lambda m, x: m.diagonal(x, 1, 0, 2), (4, 2, 3)),
    case("diagonal below", lambda m, x: m.diagonal(x, -2), (5, 3)),
    case("diagonal of nothing", lambda m, x: m.diagonal(x, 7), (5, 3)),
    case("diag", lambda m, x: m.diag(x, -1), (3,)),
    case("diag of a matrix", lambda m, x: m.diag(x, 1), X),
    case("trace", lambda m, x: m.trace(x), (3, 3)),
)

PRODUCTS = (
    case("matmul", lambda m, x, y: m.matmul(x, y), (3, 4), (4, 5)),
    case("matmul operator", lambda m, x, y: x @ y, (2, 3, 4), (4, 5)),
    case("matmul batched", lambda m, x, y: x @ y, (2, 1, 3, 4), (5, 4, 2)),
    case("matmul one row", lambda m, x, y: x @ y, (1, 4), (4, 1)),
    case("matmul a batch right", lambda m, x, y: x @ y, (3, 4), (2, 4, 5)),
    case("matmul vector", lambda m, x, y: x @ y, (4,), (2, 4, 5)),
    case("matmul by a vector", lambda m, x, y: x @ y, (2, 3, 4), (4,)),
    case("matmul vectors", lambda m, x, y: x @ y, V, V),
    case("matmul of ints", lambda m, x, y: m.matmul(x, y), INT, Arg((4, 2), "int32", -5, 6), is_smooth=False),
    case("dot", lambda m, x, y: m.dot(x, y), (2, 3, 4), (5, 4, 2)),
    case("dot of a scalar", lambda m, x: m.dot(x, 2.0), X),
    case("vdot", lambda m, x, y: m.vdot(x, y), X, X),
    case("inner", lambda m, x, y: m.inner(x, y), (2, 4), (3, 4)),
    case("outer", lambda m, x, y: m.outer(x, y), V, X),
    case("tensordot", lambda m, x, y: m.tensordot(x, y, 2), (2, 3, 4), (3, 4, 5)),
    case("tensordot axes", lambda m, x, y: m.tensordot(x, y, ((2, 0), (0, 1))), (2, 3, 4), (4, 2, 5)),
    case("tensordot 0", lambda m, x, y: m.tensordot(x, y, 0), (2, 3), (4,)),
    case("kron", lambda m, x, y: m.kron(x, y), (2, 3), (4, 2)),
    case("vecdot", lambda m, x, y: m.vecdot(x, y), X, (4,)),
    case("einsum product", lambda m, x, y: m.einsum("ij,jk->ik", x, y), (3, 4), (4, 5)),
    case("einsum implicit", lambda m, x, y: m.einsum("ij,jk", x, y), (3, 4), (4, 5)),
    case("einsum transposed", lambda m, x: m.einsum("ijk->kij", x), (2, 3, 4)),
    case("einsum sum", lambda m, x: m.einsum("ijk->j", x), (2, 3, 4)),
    case("einsum trace", lambda m, x: m.einsum("ii", x), (3, 3)),
    case("einsum diagonal", lambda m, x: m.einsum("iji->ij", x), (3, 2, 3)),
    case("einsum batched", lambda m, x, y: m.einsum("bthd,bshd->bhts", x, y), (2, 3, 2, 4), (2, 5, 2, 4)),
    case("einsum elementwise", lambda m, x, y: m.einsum("ij,ij->ij", x, y), X, X),
    case("einsum dots", lambda m, x, y: m.einsum("ij,ij->i", x, y), X, X),
    case("einsum outer", lambda m, x, y: m.einsum("i,j->ji", x, y), (3,), (4,)),
    case("einsum ellipsis", lambda m, x, y: m.einsum("...ij,...jk->...ik", x, y), (2, 1, 3, 4), (5, 4, 2)),
    case("einsum ellipsis summed", lambda m, x, y: m.einsum("i...,i->...", x, y), (3, 4), (3,)),
    case("einsum three", lambda m, x, y, z: m.einsum("ij,jk,kl->il", x, y, z), (3, 4), (4, 2), (2, 5), atol=1e-5),
    case(
        "einsum three shared",
        lambda m, x, y, z: m.einsum("bi,bij,bj->b", x, y, z),
        (2, 3),
        (2, 3, 4),
        (2, 4),
        atol=1e-5,
    ),
    case("einsum alone", lambda m, x, y: m.einsum("ij,kl->k", x, y), (2, 3), (4, 5), atol=1e-5),
)

ROWS = np.array([[2, 0], [1, -1]])
MASK = np.array([True, False, True])

INDEXING = (
    case("int", lambda m, x: x[1], X),
    case("negative int", lambda m, x: x[-1, 2], X),
    case("slices", lambda m, x: x[1:, ::2], X),
    case("negative steps", lambda m, x: x[::-1, 3:0:-2], X),
    case("an empty slice", lambda m, x: x[2:1], X),
    case("ellipsis", lambda m, x: x[..., 0], (2, 3, 4)),
    case("newaxis", lambda m, x: x[:, None, 1:, None], X),
    case("an array", lambda m, x: x[ROWS], X),
    case("a list", lambda m, x: x[np.array([2, 0, 0])], X),
    case("an array on the second axis", lambda m, x: x[:, ROWS], X),
    case("two arrays", lambda m, x: x[np.array([0, 2]), np.array([1, -1])], X),
    case("broadcast arrays", lambda m, x: x[np.array([[0], [2]]), np.array([1, 3, 0])], X),
    case("arrays apart", lambda m, x: x[np.array([0, 1]), :, np.array([2, 0])], (2, 3, 4)),
    case("an array and an int", lambda m, x: x[:, np.array([0, 2]), 1], (2, 3, 4)),
    case("an int and an array apart", lambda m, x: x[0, :, np.array([2, 0])], (2, 3, 4)),
    case("an array and slices", lambda m, x: x[1:, np.array([0, 2]), ::-1], (3, 3, 4)),
    case("an array and newaxis", lambda m, x: x[None, np.array([0, 2]), :, None], X),
    case("a mask", lambda m, x: x[MASK], X),
    case("a mask of two dims", lambda m, x: x[np.eye(3, 4, dtype=bool)], X),
    case("a mask and an int", lambda m, x: x[MASK, 1], X),
    case("a traced index", lambda m, x, i: x[i], X, Arg((5,), "int32", -3, 3)),
    case("a traced scalar", lambda m, x, i: x[i], X, Arg((), "int32", -3, 3)),
    case(
        "two traced scalars", lambda m, x, i, j: x[i, :, j], (2, 3, 4), Arg((), "int32", 0, 2), Arg((), "int32", -4, 4)
    ),
    case("traced rows and columns", lambda m, x, i: x[np.arange(5) % 3, i], X, Arg((5,), "int32", -4, 4)),
    case("a grid", lambda m, x, i, j: x[i[:, None], j], X, Arg((2,), "int32", 0, 3), Arg((3,), "int32", 0, 4)),
    case("take", lambda m, x, i: m.take(x, i, axis=1), X, Arg((2, 2), "int32", 0, 4)),
    case("take flat", lambda m, x, i: m.take(x, i), X, Arg((5,), "int32", 0, 12)),
    case("take clipped", lambda m, x, i: m.take(x, i, axis=0, mode="clip"), X, Arg((5,), "int32", -9, 9)),
    case("take wrapped", lambda m, x, i: m.take(x, i, axis=0, mode="wrap"), X, Arg((5,), "int32", -9, 9)),
    case("take_along_axis", lambda m, x, i: m.take_along_axis(x, i, axis=1), X, Arg((3, 2), "int32", 0, 4)),
    case("take_along_axis 0", lambda m, x, i: m.take_along_axis(x, i, axis=0), X, Arg((5, 4), "int32", 0, 3)),
    case("take_along_axis broadcast", lambda m, x, i: m.take_along_axis(x, i, axis=1), X, Arg((1, 2), "int32", 0, 4)),
)

CASES = {
    f"{group}: {each.name}": each
    for group, cases in {
        "elementwise": ELEMENTWISE,
        "reductions": REDUCTIONS,
        "creation": CREATION,
        "shapes": SHAPES,
        "products": PRODUCTS,
        "indexing": INDEXING,
    }.items()
    for each in cases
}
SMOOTH = {name: each for name, each in CASES.items() if each.is_smooth}


def call_of(each: Case, module: Any) -> Any:
    return lambda *arrays: each.call(module, *arrays)


@pytest.mark.parametrize("name", [name for name, each in CASES.items() if each.oracle != "jax"])
def test_values_are_numpys(name: str) -> None:
    each = CASES[name]
    arrays = draw(each.args, name)
    with np.errstate(all="ignore"):
        wanted = each.call(np, *arrays)
    assert_close(each.call(tnp, *arrays), wanted, each.atol, check_dtype=False)


@pytest.mark.parametrize("name", [name for name, each in CASES.items() if each.oracle != "numpy"])
def test_values_and_dtypes_are_jaxs(name: str) -> None:
    pytest.importorskip("jax")
    import jax.numpy as jnp

    each = CASES[name]
    arrays = draw(each.args, name)
    assert_close(each.call(tnp, *arrays), each.call(jnp, *(jnp.asarray(x) for x in arrays)), each.atol)


@pytest.mark.parametrize("name", CASES)
def test_traced_is_eager(name: str) -> None:
    each = CASES[name]
    arrays = draw(each.args, name)
    assert_close(traced(call_of(each, tnp), arrays), each.call(tnp, *arrays), 1e-7)


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_are_finite_differences(name: str) -> None:
    """In float64: the gradient along a direction, and its derivative along another."""
    each = SMOOTH[name]
    arrays = draw(each.args, name, "float64")
    check_derivatives(call_of(each, tnp), arrays, tnp)


def check_derivatives(function: Any, arrays: list[Any], module: Any) -> None:
    numbers = tuple(position for position, x in enumerate(arrays) if x.dtype == np.float64)
    generator = np.random.default_rng(7)
    weights = [generator.uniform(0.5, 1.5, y.shape) for y in flat(function(*arrays))]
    total = scalar_of(function, weights, module)
    direction = {position: generator.uniform(-1, 1, arrays[position].shape) for position in numbers}

    def moved(step: float) -> list[Any]:
        return [x + step * direction[p] if p in direction else x for p, x in enumerate(arrays)]

    def along(*values: Any) -> Any:
        slopes = derivatives.grad(total, argnums=numbers)(*values)
        return sum((module.sum(slope * direction[p]) for slope, p in zip(slopes, numbers, strict=True)), start=0.0)

    step = 1e-6
    slope = (total(*moved(step)) - total(*moved(-step))) / (2 * step)
    np.testing.assert_allclose(along(*arrays), slope, rtol=1e-6, atol=1e-7)
    curvature = (along(*moved(step)) - along(*moved(-step))) / (2 * step)
    second = gradient(along, arrays, numbers)
    got = sum(float(np.sum(g * direction[p])) for g, p in zip(second, numbers, strict=True))
    np.testing.assert_allclose(got, curvature, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_jaxs(name: str) -> None:
    pytest.importorskip("jax")
    import jax
    import jax.numpy as jnp

    each = SMOOTH[name]
    if each.oracle == "numpy":
        pytest.skip("jax.numpy has no such function")
    arrays = draw(each.args, name)
    numbers = tuple(position for position, x in enumerate(arrays) if x.dtype == np.float32)
    generator = np.random.default_rng(7)
    weights = [generator.uniform(0.5, 1.5, y.shape).astype(np.float32) for y in flat(each.call(tnp, *arrays))]
    wanted = jax.grad(scalar_of(call_of(each, jnp), weights, jnp), argnums=numbers)(*(jnp.asarray(x) for x in arrays))
    got = gradient(scalar_of(call_of(each, tnp), weights, tnp), arrays, numbers)
    assert_close(got, wanted, max(1e-5, each.atol))


@pytest.mark.parametrize("name", [name for name, each in CASES.items() if each.args])
def test_a_batch_is_a_loop(name: str) -> None:
    each = CASES[name]
    function = call_of(each, tnp)
    rows = [draw(each.args, f"{name} {row}") for row in range(3)]
    wanted = [np.stack(column) for column in zip(*(flat(function(*row)) for row in rows), strict=True)]
    stacked = [np.stack(column) for column in zip(*rows, strict=True)]
    got = flat(batched(function, stacked))
    assert_close(got, wanted, 1e-6)
    if len(stacked) > 1:
        mixed = [stacked[0], *rows[0][1:]]
        wanted = [np.stack(c) for c in zip(*(flat(function(r[0], *rows[0][1:])) for r in rows), strict=True)]
        assert_close(flat(batched(function, mixed, (0, *(None for _ in mixed[1:])))), wanted, 1e-6)


@pytest.mark.parametrize("times", [lambda w, x: x @ w, lambda w, x: w @ x, lambda w, x: tnp.vecmat(x, w)])
def test_vectors_times_a_matrix_that_they_share_are_one_matrix_product(times: Any) -> None:
    w, vectors = np.ones((4, 4), np.float32), np.ones((9, 4), np.float32)
    step = jit(batching.vmap(times, in_axes=(None, 0))).lower(w, vectors)
    assert [item.op for item in step.program.operations] == ["mm"]

"""Each module imports only from the layers before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainkernel

PACKAGE = Path(trainkernel.__file__).parent

# From the ground up. A module may import from its own row and from every row above it; a name stands for a module or a
# package with all in it. ``runtime`` has a narrower rule of its own.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("dtypes",),
    ("target", "facts", "stamps"),
    ("ops",),
    ("ir",),
    ("validation",),
    ("serialization", "builder"),
    ("reference",),
    ("mlp", "data", "tree", "trace"),
    ("promotion",),
    ("primitives",),
    ("structure",),
    ("autodiff", "batching"),
    ("numpy", "random"),
    ("derivatives", "custom_rules", "scanning", "shape_structs"),
    ("windows", "initializers", "jacobians", "flatten_util"),
    ("lax", "nn"),
    ("losses", "optim"),
    ("assemble",),
    ("options", "indexing", "arithmetic"),
    ("access", "passes", "product_plans"),
    ("carried_casts",),
    ("block_tiles",),
    ("near_products", "product_costs"),
    ("products",),
    ("reduction_plans",),
    ("alignment",),
    ("region_plans",),
    ("region_costs",),
    ("regions",),
    ("lowering",),
    ("schedule",),
    ("shared", "block_ranges"),
    ("balancing",),
    ("fusion", "row_groups", "placement"),
    ("memory",),
    ("verify",),
    ("codegen",),
    ("emulator", "runtime"),
    ("arguments", "program_cache"),
    ("kernel", "sample_arrays"),
    ("tuning",),
    ("compiler",),
    ("jitted",),
    ("digits_step",),
    ("work",),
    ("inspection",),
    ("inspection_views", "measurement"),
    ("cli", "demo"),
)
RUNTIME_MAY_IMPORT = {"errors", "dtypes", "runtime"}
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}

# Function-level imports that reach upwards on purpose: a method or a lazy attribute of the public surface.
LAZY_UPWARD = {"__init__", "__main__", "ir", "emulator"}


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.Module, top_level: bool) -> Iterator[str]:
    """Layers of trainkernel that a module imports at its top level (type checking included), or inside functions."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if (id(node) in inside) == top_level:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "trainkernel":
                names = [f"trainkernel.{alias.name}" for alias in node.names]
            else:
                names = [node.module or ""]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "trainkernel" and len(parts) > 1 and parts[1] in LEVEL:
                yield parts[1]


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name not in ("__init__.py",))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__main__":
        return
    assert layer in LEVEL, f"{path.name} belongs to no layer: give it a place in LAYERS"
    tree = ast.parse(path.read_text())
    for imported in imports(tree, top_level=True):
        if layer == "runtime":
            assert imported in RUNTIME_MAY_IMPORT, f"{path.name} imports {imported}; the runtime knows nothing of it"
        assert LEVEL[imported] <= LEVEL[layer], f"{path.name} imports {imported}, a layer above its own"
    if layer not in LAZY_UPWARD:
        for imported in imports(tree, top_level=False):
            assert LEVEL[imported] <= LEVEL[layer], (
                f"a function of {path.name} imports {imported}, a layer above its own"
            )


def test_every_layer_exists() -> None:
    missing = [name for name in LEVEL if not (PACKAGE / name).is_dir() and not (PACKAGE / f"{name}.py").is_file()]
    assert not missing

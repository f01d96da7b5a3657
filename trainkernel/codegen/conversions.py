"""C++ text of dtypes: registers, loads, conversions and stores.

A value of a dtype is held in a register of its domain's C type: the 16-bit floats and bool (0 or
1) as float, uint8 as int. An operand is converted to the operation's domain by a cast. A result
is converted once to the output's dtype, by the rules of ``trainkernel.ops.domains``, and held in
that dtype's register.
"""

from __future__ import annotations

from trainkernel.indexing import Index
from trainkernel.ops.domains import domain_of_dtype

C_TYPES = {"float32": "float", "float64": "double", "int32": "int", "uint32": "unsigned", "int64": "long long"}
_STRUCTS = ("float16", "bfloat16", "bool")


def register_type(dtype: str) -> str:
    """The C type of the register that holds a value of a dtype."""
    return C_TYPES[domain_of_dtype(dtype)]


def loaded(element: str, dtype: str) -> str:
    """A stored element as its register's value."""
    return f"tk_value({element})" if dtype in _STRUCTS else element


def operand_in(register: str, dtype: str, domain: str) -> str:
    """The register of a value of a dtype as an operand in a domain."""
    return register if domain_of_dtype(dtype) == domain else f"({C_TYPES[domain]}){register}"


def rounded(expression: str, domain: str, dtype: str) -> str:
    """A result in a domain, converted to a dtype and held in that dtype's register."""
    if domain == dtype:
        return expression
    if domain == "float32" and domain_of_dtype(dtype) == "float32":
        return f"tk_round_{dtype}({expression})"
    return f"tk_to_{dtype}({expression})"


def store(pointer: str, index: Index | str, value: str, dtype: str) -> str:
    """The statement that writes one element from its dtype's register."""
    if dtype in _STRUCTS:
        return f"tk_store({pointer}[{index}], {value});"
    return f"{pointer}[{index}] = {value};"

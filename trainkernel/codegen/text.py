"""Pieces of C++ text: comments that are safe whatever users wrote, blocks, function objects."""

from __future__ import annotations

INDENT = "  "
_MAX_COMMENT = 400


def escape(text: str) -> str:
    """Printable ASCII that can end neither a line nor a comment.

    Newlines, backslashes, non-ASCII characters, comment marks and trigraphs are written out as
    ``{U+000A}`` and the like.
    """
    if text.isascii() and text.isprintable() and not any(mark in text for mark in ("\\", "*/", "/*", "??")):
        return text
    safe = []
    for position, character in enumerate(text):
        pair = text[position : position + 2]
        if not " " <= character <= "~" or character == "\\" or pair in ("*/", "/*", "??"):
            safe.append(f"{{U+{ord(character):04X}}}")
        else:
            safe.append(character)
    return "".join(safe)


def comment(text: str) -> str:
    """One ``//`` comment line."""
    safe = escape(text)
    if len(safe) > _MAX_COMMENT:
        safe = safe[:_MAX_COMMENT] + " ..."
    return f"// {safe}".rstrip()


def block(head: str, body: list[str]) -> list[str]:
    """Statements in braces after a head."""
    return [f"{head} {{", *(INDENT + line for line in body if line), "}"]


def flag(value: bool) -> str:
    """A bool as C++ writes it."""
    return "true" if value else "false"


def function_object(name: str, arguments: str, body: list[str], result: str | None, c_type: str = "float") -> list[str]:
    """A local function object."""
    if result is not None:
        body = [*body, f"return {result};"]
    kind = "" if result is None else f" -> {c_type}"
    return [f"auto {name} = [&]({arguments}){kind} {{", *(INDENT + line for line in body), "};"]

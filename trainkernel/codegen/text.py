"""Text that comes from users, made safe for C++ and C comments."""

from __future__ import annotations

_MAX_COMMENT = 400


def escape(text: str) -> str:
    """Printable ASCII that can end neither a line nor a comment.

    Newlines, backslashes, non-ASCII characters, comment marks and trigraphs are written out as
    ``{U+000A}`` and the like.
    """
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

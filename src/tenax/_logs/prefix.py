"""The prefix of a worker's line on the console."""

from __future__ import annotations


def line_prefix(
    template: str | None,
    *,
    role_name: str,
    rank: int,
    local_rank: int,
    generation: int | None = None,
    host: str | None = None,
) -> str:
    """Return ``[role0]:`` by default, otherwise the template with its macros (``${role_name}`` etc.) substituted.

    An unknown macro stays as written, so that a typo shows in the output.
    """
    if template is None:
        return f"[{role_name}{local_rank}]:"
    from string import Template

    known: dict[str, object] = {"role_name": role_name, "rank": rank, "local_rank": local_rank}
    if generation is not None:
        known["generation"] = generation
    if host is not None:
        known["host"] = host
    return Template(template).safe_substitute(known)

"""Prefix: what stands before a worker's line on the console. A pure function of the worker's place in the group."""

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
    """``[role0]:`` by default, else the template with its macros (``${role_name}`` and so on) filled in.

    A macro that is not known stays as it is written, so a typing error is seen in the output rather than losing it.
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

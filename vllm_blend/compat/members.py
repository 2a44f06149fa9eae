"""Every member of vLLM that this package touches: private ones, and public ones that it builds on.

In two parts, each grouped by how a member is touched, and by the module of this package that does it.
A member with parameters was read, and is called, wrapped or overridden, as it stands there; of the
others it matters that they are there. What versions differ in is ``newer``: by the version in which it
became so. ``fit.py`` holds a vLLM against this table, and ``tests/compat`` holds this package against
it.
"""

from __future__ import annotations

from vllm_blend.compat import members_engine, members_model
from vllm_blend.compat.member import VERSIONS as VERSIONS
from vllm_blend.compat.member import Member as Member

TABLE = members_engine.TABLE + members_model.TABLE


def members() -> list[Member]:
    """All of the table, each once."""
    return list(dict.fromkeys(m for part in TABLE for group in part.values() for m in group))

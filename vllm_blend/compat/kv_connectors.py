"""vLLM's KV connectors: which of them move a request's own blocks, and steps that none of them sees.

``kv_transfer_state._KV_CONNECTOR_AGENT``   set to None while a forward runs that is no step of vLLM's
    scheduler (``unseen``), as vLLM does for its own. The V2 runner has ``set_disabled`` for it.
    Goes when the V1 runner has such a switch.
``KVConnectorBase_V1.get_loaded_kv_cache_group_ids``   looked up: vLLM says that a connector which
    transfers a request's own blocks overrides it, and one that finds blocks by their tokens does not.
    Goes when a connector states what it is by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def leaves(connector: Any) -> list[Any]:
    """The connectors that a connector is made of: of a ``MultiConnector`` its parts."""
    parts = getattr(connector, "sub_connectors", None)
    return [connector] if parts is None else [leaf for part in parts for leaf in leaves(part)]


def moves_blocks(connector: Any) -> bool:
    """Whether a connector says that it transfers a request's own blocks (NIXL, Mooncake), to an engine
    that asks for this very request; else it may find blocks by their tokens (LMCache)."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    stock = KVConnectorBase_V1.get_loaded_kv_cache_group_ids
    return type(connector).get_loaded_kv_cache_group_ids is not stock


@contextmanager
def unseen(runner: Any = None) -> Iterator[None]:
    """While it lasts, no KV connector hears of what the model's process computes.

    Args:
        runner: vLLM's, where whole steps run meanwhile.
    """
    import vllm.distributed.kv_transfer.kv_transfer_state as of_process

    agent = of_process._KV_CONNECTOR_AGENT
    if agent is None:
        yield
        return
    of_runner = getattr(runner, "kv_connector", None)  # the V2 runner's
    if of_runner is not None:
        of_runner.set_disabled(True)
    of_process._KV_CONNECTOR_AGENT = None
    try:
        yield
    finally:
        if of_runner is not None:
            of_runner.set_disabled(False)
        of_process._KV_CONNECTOR_AGENT = agent

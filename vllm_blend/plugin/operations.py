"""What an operator asks of an engine, done in the engine and in its ranks.

``EngineCore.blend_operation`` is called as vLLM's own utilities are, between steps; it takes and
returns what JSON can hold.
"""

from __future__ import annotations

from typing import Any

from vllm_blend.compat.engine_access import model_of
from vllm_blend.server.messages import WorkerCommands


def operate(core: Any, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Does one operation, in the engine.

    Args:
        name: ``stats``, ``list``, ``delete``, ``delete_tenant``, ``verify``, ``warm`` or ``switch``.
        values: the operation's; ``pieces`` are chunks' token ids.

    Raises:
        ValueError: if there is none of that name.
    """
    scheduler, executor = core.scheduler, core.model_executor
    operations = scheduler.blend_operations
    found: dict[str, Any]
    match name:
        case "stats":
            found = operations.stats()
        case "list":
            found = operations.listed(values["tenant"], values["offset"], values["limit"])
        case "delete":
            chunks = operations.variants(values["tenant"], values["pieces"])
            found = operations.delete(chunks)
            executor.collective_rpc(apply, args=(WorkerCommands(discard=tuple(chunks)),))
        case "delete_tenant":
            found = operations.delete_tenant(values["tenant"])
            contexts = list(scheduler.blend_internal.contexts.known)
            executor.collective_rpc(purge_tenant, args=(values["tenant"], contexts))
        case "verify":
            ranks = [set(keys) for keys in executor.collective_rpc(whole)]
            found = operations.verify(set.intersection(*ranks))
        case "warm":
            found = operations.warm(values["tenant"], values["pieces"])
        case "switch":
            executor.collective_rpc(switch, args=(values["on"],))
            scheduler.switch_blending(values["on"])
            found = {"blending": values["on"]}
        case _:
            raise ValueError(f"no operation {name!r}")
    if commands := scheduler.take_blend_commands():  # an idle engine makes no step that takes them
        executor.collective_rpc(apply, args=(commands,))
    return found


# --- in each rank ---------------------------------------------------------------------------------


def apply(worker: Any, commands: WorkerCommands) -> None:
    """Does what a step would have brought."""
    if (blending := model_of(worker.vllm_config)) is not None:
        blending.chunks.apply(commands)


def purge_tenant(worker: Any, tenant: str, contexts: list[tuple[int, ...]]) -> None:
    """Begins to remove a tenant's chunks from the store's disk."""
    blending = model_of(worker.vllm_config)
    if blending is not None and blending.chunks.tiers is not None:
        blending.chunks.tiers.purge_tenant(tenant, contexts)


def whole(worker: Any) -> list[bytes]:
    """The chunks of which this rank has all KV, in finite numbers."""
    blending = model_of(worker.vllm_config)
    return [] if blending is None else blending.chunks.whole()


def switch(worker: Any, on: bool) -> None:
    """Blends from the next step on, or not."""
    if (blending := model_of(worker.vllm_config)) is not None:
        blending.guard.switch(on)

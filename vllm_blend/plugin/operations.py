"""What an operator asks of an engine, done in the engine and in its ranks.

``EngineCore.blend_operation`` is called as vLLM's own utilities are, between steps; it takes and
returns what JSON can hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_blend.compat.engine_access import model_of
from vllm_blend.server.messages import WorkerCommands

logger = logging.getLogger("vllm.vllm_blend")


class RankFailed(RuntimeError):
    """What an operator asked for failed on a rank."""


def operate(core: Any, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Does one operation, in the engine.

    Args:
        name: ``stats``, ``list``, ``delete``, ``delete_tenant``, ``verify``, ``warm`` or ``switch``.
        values: the operation's; ``pieces`` are chunks' token ids.

    Raises:
        ValueError: if there is none of that name.
        RankFailed: if a rank failed; all chunks in memory are then forgotten.
    """
    try:
        return _operate(core, name, values)
    except RankFailed as error:
        core.scheduler.failed(error)  # the ranks may know different chunks now
        raise


def _operate(core: Any, name: str, values: dict[str, Any]) -> dict[str, Any]:
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
            _ask(executor, apply, WorkerCommands(discard=tuple(chunks)))
        case "delete_tenant":
            found = operations.delete_tenant(values["tenant"])
            contexts = list(scheduler.blend_internal.contexts.known)
            _ask(executor, purge_tenant, values["tenant"], contexts)
        case "verify":
            ranks = [set(keys) for keys in _ask(executor, whole)]
            found = operations.verify(set.intersection(*ranks))
        case "warm":
            found = operations.warm(values["tenant"], values["pieces"])
        case "switch":
            _ask(executor, switch, values["on"])
            scheduler.switch_blending(values["on"])
            found = {"blending": values["on"]}
        case _:
            raise ValueError(f"no operation {name!r}")
    if commands := scheduler.take_blend_commands():  # an idle engine makes no step that takes them
        _ask(executor, apply, commands)
    return found


def _ask(executor: Any, do: Callable[..., Any], *args: Any) -> list[Any]:
    """What each rank returns.

    Raises:
        RankFailed: if one of them raised, once all have answered: where one raises, vLLM's executor
            leaves the answers of those behind it unread, and takes them for those to its next question.
    """
    told = executor.collective_rpc(attempt, args=(do, args))
    failures = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(told) if error is not None]
    if failures:
        raise RankFailed("; ".join(failures))
    return [result for result, _ in told]


# --- in each rank ---------------------------------------------------------------------------------


def attempt(worker: Any, do: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, str | None]:
    """What ``do`` returns, or the error that it raises."""
    try:
        return do(worker, *args), None
    except Exception as error:
        logger.exception("vllm_blend: what the operator asked for failed.")
        return None, f"{type(error).__name__}: {error}"


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

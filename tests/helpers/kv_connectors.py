"""KV connectors of the two kinds, small: one moves a request's own blocks, the other finds blocks by
their tokens. They keep them in this process's memory.

    kv_transfer_config={"kv_connector": "MovesBlocks", "kv_role": "kv_both",
                        "kv_connector_module_path": "kv_connectors"}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

MODULE = "kv_connectors"
MOVED: dict[str, dict[str, torch.Tensor]] = {}
"""Blocks by the name of a request's transfer, and by layer."""
FOUND: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
"""Blocks by the tokens of a prompt that they hold, and by layer."""
SEEN: list[str] = []
"""Ids of requests that ``FindsBlocks`` was given."""


def config(name: str, role: str = "kv_both") -> dict[str, Any]:
    """vLLM's ``kv_transfer_config``."""
    return {"kv_connector": name, "kv_role": role, "kv_connector_module_path": MODULE}


@dataclass
class Copies(KVConnectorMetadata):
    """What a step copies: blocks of the paged cache, and a dictionary's place for them."""

    saves: list[tuple[Any, list[int]]] = field(default_factory=list)
    loads: list[tuple[Any, list[int]]] = field(default_factory=list)


class InMemory(KVConnectorBase_V1, SupportsHMA):
    """What both have in common: blocks of a prompt are saved layer by layer, and loaded before a
    step. Of one group of layers."""

    kept: dict[Any, dict[str, torch.Tensor]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._block_size = self._vllm_config.cache_config.block_size
        self._loads: dict[str, Any] = {}
        self._blocks: dict[str, list[int]] = {}
        self._requests: dict[str, Any] = {}

    def save_as(self, request: Any) -> Any:
        """Under which name a request's blocks are kept; None: they are not."""
        raise NotImplementedError

    def load_from(self, request: Any) -> Any:
        """Under which name there are blocks for a request; None: there are none."""
        raise NotImplementedError

    def num_tokens(self, request: Any) -> int:
        """Of a prompt's beginning that are kept; at least its last token is computed."""
        raise NotImplementedError

    # --- in the scheduler ---------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if self.load_from(request) is None:
            return 0, False
        return max(0, self.num_tokens(request) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loads[request.request_id] = self.load_from(request)

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        found = Copies()
        cached = scheduler_output.scheduled_cached_reqs
        new = [(one.req_id, one.block_ids[0]) for one in scheduler_output.scheduled_new_reqs]
        for req_id, block_ids in new:
            self._blocks[req_id] = list(block_ids)
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                self._blocks[req_id] += block_ids[0]
        for req_id in [*(name for name, _ in new), *cached.req_ids]:
            request = self._requests[req_id]
            blocks = self._blocks[req_id][: -(-self.num_tokens(request) // self._block_size)]
            if req_id in self._loads:
                found.loads.append((self._loads.pop(req_id), blocks))
            elif (name := self.save_as(request)) is not None:
                found.saves.append((name, blocks))
        return found

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        return False, None

    # --- in the model's process ---------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, blocks in self._get_connector_metadata().loads:
            for layer, saved in self.kept[name].items():
                forward_context.no_compile_layers[layer].kv_cache[blocks] = saved

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for name, blocks in self._get_connector_metadata().saves:
            self.kept.setdefault(name, {})[layer_name] = kv_layer[blocks].clone()

    def wait_for_save(self) -> None:
        pass


class MovesBlocks(InMemory):
    """Moves a request's own blocks: the client asks one engine to ``send`` them and hands what it says
    to another."""

    kept = MOVED

    def save_as(self, request: Any) -> Any:
        return (request.kv_transfer_params or {}).get("send")

    def load_from(self, request: Any) -> Any:
        return (request.kv_transfer_params or {}).get("receive")

    def num_tokens(self, request: Any) -> int:
        return len(request.prompt_token_ids) - 1

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished_all_groups(request, block_ids)
        name = self.save_as(request)
        return False, None if name is None else {"receive": name}


class FindsBlocks(InMemory):
    """Finds blocks by their tokens alone, whoever asks."""

    kept = FOUND

    def save_as(self, request: Any) -> Any:
        SEEN.append(request.request_id)
        return self._tokens(request)

    def load_from(self, request: Any) -> Any:
        tokens = self._tokens(request)
        return tokens if tokens in FOUND else None

    def _tokens(self, request: Any) -> tuple[int, ...]:
        return tuple(request.prompt_token_ids[: self.num_tokens(request)])

    def num_tokens(self, request: Any) -> int:
        """Whole blocks."""
        return (len(request.prompt_token_ids) - 1) // self._block_size * self._block_size

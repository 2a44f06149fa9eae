"""What the engine's KV connectors see of its requests.

moves blocks   (NIXL, Mooncake) hands a request's own blocks to the engine that answers it, blended or
               not
finds blocks   (LMCache, offloading) keeps them under names made of their tokens: it must never be given
               those of a blended request, which would pose as exact, and never be asked for one's

No connector sees the engine's own requests. Their methods are wrapped one by one, since vLLM asks what
class they are; that can go when its scheduler may say which requests a connector sees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import fields, replace
from functools import wraps
from typing import Any

from vllm_blend.compat.kv_connectors import leaves, moves_blocks
from vllm_blend.core.plans import EXTRA_ARG
from vllm_blend.server.internal.internal_requests import InternalRequests
from vllm_blend.server.request import APPROXIMATE
from vllm_blend.server.scheduler.request_plans import RequestPlans
from vllm_blend.server.scheduler.request_reports import BROUGHT, Reports

logger = logging.getLogger("vllm.vllm_blend.server")

Hides = Callable[[str], bool]
"""Whether a connector does not see a request, by its id."""


class Connected:
    """A part of the mixin for vLLM's scheduler."""

    # of vLLM's scheduler
    connector: Any

    blend_internal: InternalRequests
    blend_plans: RequestPlans
    blend_reports: Reports

    def connect(self, movers: Collection[str]) -> None:
        """To be called once the scheduler is made; ``movers`` as ``KVConnectors`` has them."""
        is_mine = self.blend_internal.is_mine
        self.connectors = KVConnectors(self.connector, movers, is_mine, self._brought)

    def _brought(self, request: Any) -> None:
        """A KV connector has KV of this request, which is not blended then."""
        if self.blend_plans.withdraw(request):
            self.blend_reports.fail(request.request_id, BROUGHT)

    def add_request(self, request: Any) -> None:
        stock: Any = super()
        self.connectors.add(request)
        stock.add_request(request)

    def _connector_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        stock: Any = super()
        keeps_blocks, params = stock._connector_finished(request)
        if params is not None and self.connectors.is_approximate(request.request_id):
            params = params | {APPROXIMATE: True}
        return keeps_blocks, params


class KVConnectors:
    """An engine's connectors, and what they do not see.

    Args:
        connector: of vLLM's scheduler; None: there is none.
        movers: class names of connectors that move a request's own blocks, beside those that say so.
        is_mine: whether a request is the engine's own, by its id.
        on_found: called with a request of whose tokens a connector has some.
    """

    def __init__(
        self,
        connector: Any,
        movers: Collection[str],
        is_mine: Hides,
        on_found: Callable[[Any], None],
    ) -> None:
        self._is_mine = is_mine
        self._approximate: set[str] = set()
        self._waiting: set[str] = set()
        self._finders: list[Any] = []
        for leaf in [] if connector is None else leaves(connector):
            name = type(leaf).__name__
            moves = moves_blocks(leaf) or name in movers
            logger.info(
                "vllm_blend: the KV connector %s %s.",
                name,
                "moves a request's own blocks, those of blended ones too"
                if moves
                else "may find blocks by their tokens, so it sees no blended request. If it moves a "
                "request's own blocks instead, name it in kv_block_connectors",
            )
            if not moves:
                self._finders.append(leaf)
            hide(leaf, is_mine if moves else self.hides, on_found)

    def hides(self, request_id: str) -> bool:
        """Whether connectors that find blocks by their tokens do not see a request."""
        return (
            request_id in self._approximate or request_id in self._waiting or self._is_mine(request_id)
        )

    def is_approximate(self, request_id: str) -> bool:
        """Whether a request blends, or did."""
        return request_id in self._approximate

    def add(self, request: Any) -> None:
        """A request is about to be added, with its plan or without; one that still waits for its
        plan is not seen yet."""
        params = request.sampling_params
        plan = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
        if isinstance(plan, dict):
            self._waiting.add(request.request_id)
        elif getattr(plan, "spans", ()):
            self._approximate.add(request.request_id)

    def planned(self, request: Any) -> None:
        """A request that was added has waited for its plan."""
        self._waiting.discard(request.request_id)
        self.add(request)
        if not self.hides(request.request_id):
            for finder in self._finders:
                finder.on_new_request(request)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._approximate.discard(request_id)
        self._waiting.discard(request_id)


def hide(connector: Any, hides: Hides, on_found: Callable[[Any], None]) -> None:
    """Makes a connector of vLLM's scheduler not see some requests; its worker acts on what it says."""

    def around(name: str, unseen: Any) -> None:
        """``unseen`` is what the scheduler is told for a request that is not seen."""
        stock = getattr(connector, name, None)
        if stock is None:
            return

        @wraps(stock)
        def method(request: Any, *args: Any, **kwargs: Any) -> Any:
            return unseen if hides(request.request_id) else stock(request, *args, **kwargs)

        setattr(connector, name, method)

    match = connector.get_num_new_matched_tokens

    def matched(request: Any, *args: Any, **kwargs: Any) -> Any:
        found = match(request, *args, **kwargs)
        if found[0] and not request.skip_reading_prefix_cache:
            on_found(request)
        return found

    connector.get_num_new_matched_tokens = matched
    around("get_num_new_matched_tokens", (0, False))
    around("update_state_after_alloc", None)
    around("on_new_request", None)
    around("request_finished", (False, None))
    around("request_finished_all_groups", (False, None))
    around("register_finished_partial_tail", False)
    build = connector.build_connector_meta

    def build_connector_meta(scheduler_output: Any) -> Any:
        seen = without(scheduler_output, hides)
        metadata = build(seen)
        # the one field that a connector may change
        scheduler_output.new_block_ids_to_zero = seen.new_block_ids_to_zero
        return metadata

    connector.build_connector_meta = build_connector_meta


def without(scheduler_output: Any, hides: Hides) -> Any:
    """vLLM's ``SchedulerOutput`` without some requests; itself, where it has none of them."""
    if not any(map(hides, scheduler_output.num_scheduled_tokens)):
        return scheduler_output
    seen = copy(scheduler_output)
    seen.scheduled_new_reqs = [one for one in seen.scheduled_new_reqs if not hides(one.req_id)]
    seen.scheduled_cached_reqs = _cached_without(seen.scheduled_cached_reqs, hides)
    for name in ("num_scheduled_tokens", "scheduled_spec_decode_tokens", "scheduled_encoder_inputs"):
        setattr(seen, name, {key: v for key, v in getattr(seen, name).items() if not hides(key)})
    seen.total_num_scheduled_tokens = sum(seen.num_scheduled_tokens.values())
    if seen.preempted_req_ids is not None:
        seen.preempted_req_ids = {name for name in seen.preempted_req_ids if not hides(name)}
    return seen


def _cached_without(cached: Any, hides: Hides) -> Any:
    """The same of its ``CachedRequestData``: lists in the order of ``req_ids``, and others by id."""
    kept = [index for index, name in enumerate(cached.req_ids) if not hides(name)]
    values: dict[str, Any] = {}
    for field in fields(cached):
        value = getattr(cached, field.name)
        if isinstance(value, list):  # new_token_ids is empty without pipeline parallelism
            values[field.name] = [value[index] for index in kept] if value else value
        elif isinstance(value, dict):
            values[field.name] = {key: item for key, item in value.items() if not hides(key)}
        else:
            values[field.name] = {name for name in value if not hides(name)}
    return replace(cached, **values)

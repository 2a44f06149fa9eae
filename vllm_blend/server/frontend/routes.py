"""Routes beside the API, each only where a setting asks for it."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from vllm_blend.server.config import CONFIG_KEY, ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI


class BlendRoutes:
    """An endpoint plugin, as vLLM defines them (``vllm.plugins.endpoint_plugins``)."""

    name = "vllm_blend"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        config = app.state.args.additional_config
        if not isinstance(config, dict) or CONFIG_KEY not in config:
            return
        settings = ServerSettings.from_mapping(config[CONFIG_KEY])
        if settings.page:
            from vllm_blend.server.frontend.page import add_page

            add_page(app, settings)
        if settings.operator_key is not None:
            from vllm_blend.server.frontend.operator import add_operator_routes

            add_operator_routes(app, settings)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Notes the engine that the operator's routes ask."""
        state.blend_engine = engine_client

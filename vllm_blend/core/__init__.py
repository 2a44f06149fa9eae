"""The values that pass between the stages, and who fills each. Imports nothing else of this package.

request  -> BlendPlan / CollectPlan     ``api/blender.py``, ``core/cache_fuse_metadata.py``, the server
step     -> BlendStep of StepRequests   ``plugin/step_requests.py``, once a forward step
layer    -> Status, old_kv, metadata    ``model/active_rows.py``
"""

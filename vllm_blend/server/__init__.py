"""Blending as a property of a request: what a server needs beyond the blend path itself.

request  -> BlendRequest      frontend/admission.py: checked, sent along as plain values
text     -> spans             frontend/renderer.py: message parts and separators mark chunks
prompt   -> KeyedPlan         scheduler/lookup.py: chunks looked up, or found by content
misses   -> stored chunks     scheduler/tier_fetches.py: asked of a store's tiers, if there is one;
                              internal/background_prefill.py: computed within a budget, afterwards
figures  -> report, metrics   scheduler/request_reports.py, frontend/metrics.py
"""

"""Blending as a property of a request: what a server needs beyond the blend path itself.

request  -> BlendRequest      wire.py, in the API server: parsed, validated, sent along as plain values
text     -> spans             marks.py, in the API server: message parts and separators mark chunks
prompt   -> BlendPlan         scheduler.py, in the engine: chunks looked up (lookup.py), found by
                              content (match.py)
misses   -> stored chunks     fetches.py, in the engine: asked of a store's tiers, if there is one,
                              those that are worth it by measured times (pace.py);
                              background.py: computed within a budget, after the request
figures  -> report, metrics   reports.py, in the engine; metrics.py, in the API server
"""

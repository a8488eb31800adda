"""Chat models: one protocol, and what implements it.

- `splice.models.scripted.ScriptedModel`: replies given in advance, by node, for tests and demos
- `splice.models.endpoint.Endpoint`: any OpenAI-compatible chat-completions server
- `splice.models.spread.Spread`: several of them that serve the same model
- `splice.models.local.LocalModel`: the embedded model, on this machine, without a key
- `splice.models.cache.CachedModel`: a response cache, and record and replay, around another model
"""

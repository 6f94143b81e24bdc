"""``specrt serve``: an OpenAI-compatible HTTP server. It imports runtime and engines only (extra ``serve``)."""

"""Text generation: requests, sampling, decoding, runs over prompts, interactive prompts and an HTTP server.

Import from the modules: `request` (settings and prompts, checked without torch), `startup` (arguments, ranks,
checkpoint), `load` and `runner` (the model), `decoding`, `completion`, `run`, `interactive` and `server`.
"""

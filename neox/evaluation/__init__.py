"""Scores of a model: perplexities, LAMBADA and the tasks of lm-evaluation-harness.

Import from the modules: `run` (the tasks of a configuration), `tasks` (their names and files, checked without torch),
`results` (tables and files), `perplexity`, `lambada`, `harness` (scorers) and `scoring` (log-probabilities of token
spans).
"""

"""To and from Hugging Face: ``python -m lingua.hub export|import|fill``.

An exported folder is a model of the ``eurobert`` architecture, which ``transformers`` ships: the same blocks as ours,
so ``AutoModel`` loads it without code of this project. ``docs/hub.md`` shows the use.
"""

"""Plugins of other packages: vLLM, SGLang, torchtitan. Each loads its module by an entry point, or by its name.

Nothing here is imported by `tilestream` itself, and nothing of an engine is imported before the engine asks for it.
"""

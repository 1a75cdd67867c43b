"""Observers of vLLM's KV cache: they run inside the engine and write what it allocated, and change nothing.

The files of this package are frozen and staged beside an engine as a bundle of their own; they use the standard
library and the engine, nothing of `fpmsdk`.
Source: collector.md sections 8.3 to 8.5, vllm-facts.md section 4.
"""

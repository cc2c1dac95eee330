"""A plugin for an unmodified SGLang: prefill and decode ranks find each other over the bus, and SGLang's DP controller
(it distributes a server's requests over its data-parallel ranks) picks by our loads.

SGLang finds it by the entry point `sglang.srt.plugins` and calls `plugin.load` in each of its processes. Without
`PDBUS_SGLANG_METHOD` or `PDBUS_SGLANG=on` that does nothing. What is known of SGLang's own code is in `seams` and
`engine`; the rest knows rooms (SGLang's number of a request, by which its decode rank finds its prefill rank), ranks
and loads. docs/sglang.md is for its operator.
"""

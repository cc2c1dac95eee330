"""A plugin for an unmodified SGLang: prefill and decode ranks meet over the bus, the DP controller picks by our loads.

SGLang finds it by the entry point `sglang.srt.plugins` and calls `plugin.load` in each of its processes. Without
`PDBUS_SGLANG_METHOD` or `PDBUS_SGLANG=on` that does nothing. What is known of SGLang's own code is in `seams` and
`engine`; the rest knows rooms, ranks and loads. docs/sglang.md is for its operator.
"""

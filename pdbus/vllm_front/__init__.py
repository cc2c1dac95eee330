"""vLLM's own API server in front of a cluster: its engine core (the process that would compute) is replaced by a client
of the controller.

`pdbus serve --front vllm` starts it (`server`), and an unmodified `vllm serve` becomes one by its plugin entry point
(`plugin`) where `PDBUS_VLLM_CONTROLLER` is set. No engine core starts. `fields` says what becomes of each field of a
request, `core` stands for the engine core's client, `seams` replaces vLLM's functions, and `middleware` answers with
the status of a stream's first event. Only `seams`, `records` and `server` import vLLM. docs/edge.md is for
its operator.
"""

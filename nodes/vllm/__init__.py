"""vLLM behind the bus: a runner (what runs a rank's legs) over its `AsyncLLM`, and the care that a node process must
take around it.

`python -m nodes.prefill|decode|unified --engine vllm --model PATH -- <vLLM's own arguments>`. Only `versions`
and `seams` import vLLM, which loads `safe_pulls` itself; the runner works with anything that generates as vLLM's
`EngineClient` does.
"""

"""Benchmarks: what the bus and the control plane cost, beside a floor (the same job done by as little code as possible)
measured in the same run.

`BENCHMARKS` names them; `python -m benchmarks` runs them. There is one module for each, whose `run(scope)` measures and
returns its rows; `harness` owns processes and medians, `bare` and `http_floor` the floors. Nothing here is imported by
the parts it measures.
"""

from __future__ import annotations

from benchmarks import (
    controllers,
    dispatch,
    e2e,
    edge,
    failover,
    fleet,
    front,
    idle,
    lab,
    latency,
    library,
    peers,
    pick,
    questions,
    report,
    rooms,
    scale,
    sglang,
    vllm,
)
from benchmarks.harness import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    each.name: each
    for each in (
        Benchmark("dispatch", "client → controller → 8 nodes under full load, beside a bare broker", dispatch.run),
        Benchmark("latency", "submit to arrival at the node at a steady rate, beside a bare broker", latency.run),
        Benchmark("pick", "one pick with its raise, beside an argmin over a list", pick.run),
        Benchmark("report", "decode, validate and apply a load report, beside MessagePack alone", report.run),
        Benchmark("rooms", "finding the rank that prefilled a room, beside a bare round trip and HTTP", rooms.run),
        Benchmark("idle", "CPU with nothing to do", idle.run),
        Benchmark("scale", "the controller with ever more ranks, beside itself at 8", scale.run),
        Benchmark(
            "controllers", "several controllers over the same ranks; 4,096 ranks and one broker", controllers.run
        ),
        Benchmark("e2e", "first and last token through sim nodes of no step time, beside the bare hops", e2e.run),
        Benchmark("client", "the client library: CPU a request and a token, beside its messages alone", library.run),
        Benchmark("edge", "our HTTP edge beside other routers that are installed, ranks of no step time", edge.run),
        Benchmark("lab", "requests that the policy lab replays in a second, and what a long session costs", lab.run),
        Benchmark("failover", "from SIGKILL of a node until all that ran there is dispatched again", failover.run),
        Benchmark("fleet", "the page server of a fleet, and the controller beside itself without one", fleet.run),
        Benchmark("questions", "an operator's question about requests, the memory of them full", questions.run),
        Benchmark("vllm", "what the bus adds to vLLM, beside what vLLM's own HTTP server adds", vllm.run),
        Benchmark("front", "vLLM's own server over the bus, beside itself over its own engine core", front.run),
        Benchmark("peers", "SGLang's DP controller, vLLM's balancer and bare brokers beside our controller", peers.run),
        Benchmark("sglang", "SGLang's own code with the plugin, beside itself without it", sglang.run),
    )
}

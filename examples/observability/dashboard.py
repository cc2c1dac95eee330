"""Makes dashboard.json, for Grafana, with Grafana's own SDK (`make dashboard` installs it).

`PANELS` needs no SDK: title, unit, what it tells, and queries with their legends.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

RANK = "{{instance}}/{{dp_rank}}"
SERVED = 'role!="prefill"'


def quantiles(metric: str, matching: str = "") -> list[tuple[str, str]]:
    inside = f"sum by (le) (rate({metric}_bucket{{{matching}}}[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {inside})", f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)]


def p99_by_rank(metric: str) -> list[tuple[str, str]]:
    inside = f"sum by (le, instance, dp_rank) (rate({metric}_bucket[$__rate_interval]))"
    return [(f"histogram_quantile(0.99, {inside})", RANK)]


def rate(selector: str, by: str, legend: str) -> tuple[str, str]:
    return f"sum{f' by ({by})' if by else ''} (rate({selector}[$__rate_interval]))", legend


def what_happens(selector: str, by: str, legend: str) -> tuple[str, str]:
    """Those alone that are not 0, where there are many that never happen."""
    query, legend = rate(selector, by, legend)
    return f"{query} > 0", legend


PANELS: dict[str, list[tuple[str, str, str, list[tuple[str, str]]]]] = {
    "What is served": [
        ("Requests", "reqps", "Ended, well and not, by code.", [
            rate('pdbus_controller_events_total{event="done"}', "", "done"),
            what_happens("pdbus_controller_failed_total", "code", "{{code}}")]),
        ("Time to first token", "s", "From a submit's coming to its first token.",
         quantiles("pdbus_controller_ttft_seconds", matching=SERVED)),
        ("First tokens in time", "reqps", "By the SLO of each; exempt: cancelled, superseded, or wrong.", [
            rate(f'pdbus_controller_events_total{{event="ttft_slo_{name}"}}', "", name)
            for name in ("kept", "missed", "exempt")]),
        ("Time per output token", "s", "After the first.", quantiles("pdbus_controller_tpot_seconds")),
        ("Tokens", "short", "A second.", [
            rate('pdbus_node_admitted_tokens_total{role!="decode"}', "", "in, as they begin"),
            rate('pdbus_node_cached_tokens_total{role!="decode"}', "", "of those, from prefix caches"),
            rate("pdbus_node_output_tokens_total", "", "out")]),
        ("Live and waiting", "short", "Requests at controllers; those that wait have no rank with credit yet.", [
            ("sum(pdbus_controller_requests)", "live"), ("sum(pdbus_controller_queue_requests)", "waiting")]),
        ("Prefix-cache hits", "percentunit", "Share of prompt tokens that a prefill rank had.", [
            ('sum by (instance, dp_rank) (rate(pdbus_node_cached_tokens_total{role!="decode"}[$__rate_interval])) / '
             'sum by (instance, dp_rank) (rate(pdbus_node_admitted_tokens_total{role!="decode"}[$__rate_interval]))',
             RANK)]),
    ],
    "Ranks": [
        ("States", "short", "How many ranks of each role are in each state.", [
            ("sum by (role, state) (max by (role, state, instance, dp_rank) (pdbus_controller_rank_state))",
             "{{role}} {{state}}")]),
        ("Wanted roles", "short", "Ready ranks of each role that ought to be served: 0 is an outage.", [
            ("max by (role, model) (pdbus_controller_wanted_ready)", "{{role}} {{model}}")]),
        ("Restarts", "short", "Starts that took the place of an earlier one, in ten minutes.", [
            ("max by (instance, dp_rank) (increase(pdbus_controller_restarts_total[10m]))", RANK)]),
        ("Run slots in use", "percentunit", "Of each rank, by its own report.", [
            ("pdbus_node_running / pdbus_node_max_running", RANK)]),
        ("KV memory in use", "percentunit", "Decode ranks wait for it when it is full.", [
            ("pdbus_node_kv_tokens / pdbus_node_kv_capacity_tokens", RANK)]),
        ("Estimated load", "short", "Tokens that a dispatch would wait behind, as controllers believe.", [
            ("max by (instance, dp_rank) (pdbus_controller_estimate_tokens)", RANK)]),
        ("Prompt tokens queued", "short", "Not yet computed, or fetched.", [("pdbus_node_waiting_tokens", RANK)]),
        ("Time to first token, p99 by rank", "s", "A prefill rank's is its own part.",
         p99_by_rank("pdbus_controller_ttft_seconds")),
        ("Time per output token, p99 by rank", "s", "", p99_by_rank("pdbus_controller_tpot_seconds")),
        ("Forward steps, p99 by rank", "s", "", p99_by_rank("pdbus_node_step_seconds")),
        ("Engine busy", "percentunit", "Share of the time that it computes.", [
            ("rate(pdbus_node_busy_seconds_total[$__rate_interval])", RANK)]),
    ],
    "The bus": [
        ("Age of load reports", "s", "A rank that stops reporting is judged by work in flight alone.", [
            ("max by (instance, dp_rank) (pdbus_controller_report_age_seconds)", RANK)]),
        ("Acknowledgement lag, p99", "s", "From sending until the load report that has it.",
         p99_by_rank("pdbus_controller_acknowledgement_seconds")),
        ("Rooms", "short", "A second; expired: a decode leg never came.", [
            rate("pdbus_broker_rooms_registered_total", "", "registered"),
            rate("pdbus_broker_rooms_expired_total", "", "expired"),
            ("sum(pdbus_broker_rooms_alive)", "alive")]),
        ("KV caches moved", "Bps", "Fetched by decode ranks.", [
            rate("pdbus_node_kv_received_bytes_total", "instance, dp_rank", RANK)]),
        ("Refused messages", "short", "A second: peers of another version, strangers, keys that speak for others.", [
            what_happens("pdbus_controller_rejected_total", "reason", "controller: {{reason}}"),
            what_happens("pdbus_broker_rejected_total", "reason", "broker: {{reason}}"),
            what_happens("pdbus_node_rejected_messages_total", "reason", "node: {{reason}}"),
            what_happens("pdbus_controller_peers_refused_total", "domain", "controller: a key for {{domain}}"),
            what_happens("pdbus_broker_peers_refused_total", "domain", "broker: a key for {{domain}}")]),
        ("Regret", "short", "Tokens that a chosen rank had queued beyond the best one's, on average.", [
            ("sum by (role, method) (rate(pdbus_controller_regret_tokens_total[$__rate_interval])) / "
             "sum by (role, method) (rate(pdbus_controller_regret_dispatches_total[$__rate_interval]))",
             "{{role}}: {{method}}")]),
    ],
}  # fmt: skip


def build() -> str:
    """The dashboard as Grafana reads it."""
    from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    source = DataSourceRef(type_val="prometheus", uid="${source}")
    board = (
        dashboard.Dashboard("pdbus")
        .uid("pdbus")
        .tags(["pdbus", "llm"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
    )
    ids = itertools.count(1)
    for row, panels in PANELS.items():
        board = board.with_row(dashboard.Row(row).id(next(ids)))
        for title, unit, tells, queries in panels:
            panel = timeseries.Panel().title(title).description(tells).unit(unit).min(0).span(12).height(8)
            panel = panel.datasource(source).id(next(ids))
            for at, (query, legend) in enumerate(queries):
                target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + at))
                panel = panel.with_target(target.datasource(source))
            board = board.with_panel(panel)
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


if __name__ == "__main__":
    out = Path(__file__).with_name("dashboard.json")
    out.write_text(build(), encoding="utf-8")
    print(f"wrote {out}", file=sys.stderr)

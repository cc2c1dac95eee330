"""The `pdbus` command and its list of subcommands. Each is in a module of its own, loaded when it is used."""

from __future__ import annotations

from importlib import import_module

import click

from bus import build
from bus.runtime import cli, interrupt, logs

# name -> (module, attribute, description)
COMMANDS = {
    "up": ("pdbus.commands.up", "up", "Start a broker, a controller and nodes with one command."),
    "serve": ("pdbus.commands.serve", "serve", "Serve OpenAI's HTTP API in front of a cluster."),
    "generate": ("pdbus.commands.generate", "generate", "Send a prompt and stream the answer."),
    "status": ("pdbus.commands.status", "status", "Show every rank: state, load, work in flight."),
    "top": ("pdbus.commands.top", "top", "Watch a cluster live."),
    "trace": ("pdbus.commands.trace", "trace", "Show the life of one request, hop by hop."),
    "record": ("pdbus.commands.record", "record", "Record what each rank does, to open in Perfetto."),
    "targets": ("pdbus.commands.targets", "targets", "List the metrics addresses of all parts for Prometheus."),
    "drain": ("pdbus.commands.drain", "drain", "Let a rank finish its requests and leave."),
    "demo": ("pdbus.commands.demo", "demo", "Run real prompts through two prefill and two decode ranks."),
    "replay": ("pdbus.commands.replay", "replay", "Replay traces in virtual time and compare methods."),
    "plan": ("pdbus.commands.plan", "plan", "Find the split, methods and order that keep most SLOs of a trace."),
    "anchors": ("pdbus.commands.anchors", "command", "Print figures that others published, ours beside each."),
    "calibrate": ("pdbus.commands.calibrate", "calibrate", "Measure an engine, for replay and plan."),
    "keys": ("pdbus.commands.keys", "keys", "Make the keys that encrypt tcp connections."),
}


class _LazyGroup(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (_, _, what) in COMMANDS.items()])


BUILD = "compiled cores" if build.CORES == "compiled" else "pure Python"


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pdbus", prog_name="pdbus", message=f"%(prog)s, version %(version)s, {BUILD}")
def pdbus() -> None:
    """Prefill/decode-split LLM serving over ZeroMQ: run a cluster, send it prompts, look at its ranks."""
    logs.configure("warning", part="pdbus")
    interrupt.raise_again()  # the subcommand is imported now, and may have to clean up


def main() -> None:
    """Run the subcommand that argv names, then exit. Errors of ours become one line and an exit code
    (`bus.runtime.cli`)."""
    cli.run(pdbus, "pdbus")

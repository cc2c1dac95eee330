"""`python -m bus`: the broker as a process, until SIGINT or SIGTERM. This module owns its options and signals."""

from __future__ import annotations

from bus.runtime.interrupt import leave_at_once

if __name__ == "__main__":
    leave_at_once()  # before the imports, which take their time

import click

from bus.broker import Broker, BrokerConfig
from bus.endpoints import default_bus
from bus.runtime import cli, logs, settings
from bus.runtime.reload import on_signals


@settings.command(
    "broker",
    reloads=("beacon-s", "max-rooms", "log-level"),
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
)
@click.option(
    "--bus",
    "address",
    default=default_bus,
    show_default=default_bus(),
    metavar="BASE",
    help="Where to serve: ipc:///dir/bus or tcp://host:port (three ports).",
)
@cli.setting(
    BrokerConfig, "--room-ttl-s", type=cli.Seconds(), help="How long a room lives unless it is registered again."
)
@cli.setting(BrokerConfig, "--beacon-s", type=cli.Seconds(), help="How often to say that the broker lives.")
@cli.setting(BrokerConfig, "--max-rooms", type=click.IntRange(1), help="Rooms kept at most; more are refused.")
@click.option("--keys", default="", metavar="DIR", help="Directory of CURVE keys (pdbus keys new DIR); none: plain.")
@cli.metrics_port_option
@cli.metrics_host_option
@cli.spin_us_option
@cli.log_level_option
@cli.watch_parent_option
def main(
    address: str,
    room_ttl_s: float,
    beacon_s: float,
    max_rooms: int,
    keys: str,
    metrics_port: int,
    metrics_host: str,
    spin_us: int,
    log_level: str,
    watch_parent: bool,
) -> None:
    """Run the broker: forward publications, and answer which prefill rank has which room."""
    logs.configure(log_level, part="broker")
    config = BrokerConfig(
        address,
        room_ttl_s=room_ttl_s,
        beacon_s=beacon_s,
        max_rooms=max_rooms,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        spin_us=spin_us,
        keys=keys,
    )
    broker = Broker(config)
    broker.open()
    try:
        stop = broker.loop.stop
        on_signals(broker.loop, broker.reconfigure, stop, lambda number: stop())
        if watch_parent:
            cli.leave_with_parent(broker.loop.stop)
        cli.ready(part="broker", bus=address, epoch=broker.epoch)
        broker.loop.run()
    finally:
        broker.close()


if __name__ == "__main__":
    cli.run(main, "python -m bus")

"""`pdbus keys`: make the CURVE keys of a cluster and of its clients."""

from __future__ import annotations

from pathlib import Path

import click

from bus.runtime.keys import new_client_keys, new_keys


@click.group()
def keys() -> None:
    """Make the keys that encrypt tcp connections and say who may connect."""


@keys.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
def new(directory: Path) -> None:
    """Make a cluster's keys in DIRECTORY; give every part --keys DIRECTORY."""
    new_keys(directory)
    click.echo(f"made {directory}: broker, controllers and nodes of this cluster take --keys {directory}")
    click.echo(f"a client on another machine: pdbus keys client {directory} NAME CLIENT_DIRECTORY")


@keys.command()
@click.argument("cluster", type=click.Path(path_type=Path, file_okay=False))
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
def client(cluster: Path, name: str, directory: Path) -> None:
    """Make keys in DIRECTORY for a client NAME of the cluster whose keys lie in CLUSTER, and allow it in."""
    new_client_keys(cluster, name, directory)
    click.echo(f"made {directory}: take it to the client's machine and use --keys {directory}")
    click.echo(f"to turn the client away again, delete {cluster / 'allow' / 'clients' / (name + '.key')}")

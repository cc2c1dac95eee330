"""`pdbus keys`: make, list and revoke the CURVE keys (encryption of ZeroMQ) of a cluster's parts and of its clients, in
a directory. Owns the command line; `bus.runtime.keys` has the files."""

from __future__ import annotations

from pathlib import Path

import click

from bus.rights import ROLES, KeyRole
from bus.runtime.keys import add_key, give_key, listed_keys, new_keys, revoke_key

SINGULAR: dict[str, KeyRole] = {role.removesuffix("s"): role for role in ROLES}
directory_argument = click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
role_argument = click.argument("role", type=click.Choice(list(SINGULAR)))


@click.group()
def keys() -> None:
    """Make the keys that encrypt connections and grant rights.

    \b
    client      submits requests, and cancels and reads its own
    node        runs an instance's ranks and publishes for them; its key's name is the instance's
    controller  dispatches to nodes, and publishes its counters
    broker      forwards publications, and answers where rooms are
    viewer      sees the whole status, and what became of any request; submits and changes nothing
    admin       all that a client may; drains ranks, sees the whole status, cancels any request
    """


@keys.command()
@directory_argument
@click.argument("nodes", nargs=-1)
def new(directory: Path, nodes: tuple[str, ...]) -> None:
    """Make a cluster's keys in DIRECTORY: for its broker, controller-0, operator, HTTP edge, and NODES (instances)."""
    new_keys(directory, nodes)
    click.echo(f"made {directory}: parts that run here, and pdbus status and drain, take --keys {directory}")
    click.echo(f"for one more part or client: pdbus keys add {directory} ROLE NAME")


@keys.command()
@directory_argument
@role_argument
@click.argument("name")
def add(directory: Path, role: str, name: str) -> None:
    """Make a key for one more ROLE (see pdbus keys --help), NAME it, and list it in DIRECTORY."""
    add_key(directory, SINGULAR[role], name)
    click.echo(f"{role} {name} is allowed; to take its secret elsewhere: pdbus keys give {directory} {role} {name} OUT")


@keys.command()
@directory_argument
@role_argument
@click.argument("name")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
def give(directory: Path, role: str, name: str, out: Path) -> None:
    """Move a key's secret to OUT, with the public keys that it needs, to be copied to the machine that uses it.

    Call it again with the same OUT to renew the public keys there, after others were added or revoked.
    """
    give_key(directory, SINGULAR[role], name, out)
    click.echo(f"made {out}: take it to where {role} {name} runs and use --keys {out}")


@keys.command("list")
@directory_argument
def list_(directory: Path) -> None:
    """Show role, name and public key of all that DIRECTORY lists."""
    for role, name, key in listed_keys(directory):
        click.echo(f"{role.removesuffix('s'):<10}  {name:<24}  {key.decode()}")


@keys.command()
@directory_argument
@role_argument
@click.argument("name")
def revoke(directory: Path, role: str, name: str) -> None:
    """Remove a key from the list of DIRECTORY: it is no longer accepted, and its connections end within a second."""
    revoke_key(directory, SINGULAR[role], name)
    click.echo(f"{role} {name} is revoked where parts use {directory}; renew what was given away with: pdbus keys give")

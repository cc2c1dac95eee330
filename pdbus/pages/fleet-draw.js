// The elements of a fleet's page: tiles, heat maps and charts. Text is always set as text.

import { CHOICES, age, clock, isOld, known, kvParts, number, reportedAt, seconds, share, stateOf } from "./fleet-state.js";

export const $ = (id) => document.getElementById(id);

// An element with attributes (a function is a listener) and children (texts or elements).
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function put(element, text) { if (element.textContent !== text) element.textContent = text; }

// --- a rank as a tile ------------------------------------------------------------------------------------------------

export function tile(rank, choose) {
  const parts = {};
  for (const name of ["name", "host", "state", "when", "run", "step", "own", "estimate"]) parts[name] = el(name === "name" ? "b" : "span");
  parts.bar = el("span", { class: "bar", "aria-hidden": "true" });
  for (const kind of ["live", "kept", "cached"]) parts.bar.append(parts[kind] = el("i", { class: kind }));
  parts.kv = el("span");
  const made = el("button", { type: "button", click: () => choose(rank.id) }, parts.state, parts.name, parts.host, parts.when, parts.run, parts.bar, parts.kv, parts.step, parts.own, parts.estimate);
  made.parts = parts;
  return made;
}

export function renewTile(made, rank, fleet, chosen) {
  const { parts } = made, state = stateOf(rank), kv = kvParts(rank), old = isOld(rank);
  const kind = `tile ${state.kind}${old ? " old" : ""}${rank.id === chosen ? " chosen" : ""}`;
  if (made.className !== kind) made.className = kind;
  parts.state.className = `state ${state.tone}`;
  put(parts.state, `${state.mark.length === 1 && state.kind === "dead" ? "✕ " : ""}${state.word}`);
  put(parts.name, rank.name);
  put(parts.host, made.lone && rank.host ? `on ${rank.host}` : "");
  const slots = rank.max_running ? ` of ${rank.max_running}` : "", reported = rank.running !== null;
  put(parts.when, old && reported ? `as last reported ${reportedAt(rank, fleet.wall)}:` : "");
  put(parts.run, reported ? `${rank.running}${slots} running, ${rank.waiting} waiting` : "no load report yet");
  for (const each of ["live", "kept", "cached"]) {
    const width = `${Math.round(1000 * Math.min(1, kv?.[each] ?? 0)) / 10}%`;
    if (parts[each].style.width !== width) parts[each].style.width = width;
  }
  put(parts.kv, kv ? `KV ${share(kv.live)} live${rank.kv_pinned === null ? "" : `, ${share(kv.kept)} kept`}${rank.kv_cached === null ? "" : `, ${share(kv.cached)} cached`}` : "KV –");
  const medians = fleet.medians(rank), busy = rank.busy ?? null, beside = (value, show) => (value === null ? "" : ` (median ${show(value)})`);
  put(parts.step, old ? "" : `step ${seconds(rank.step_s)}${beside(medians.step, seconds)}${busy === null ? "" : `, busy ${share(busy)}`}`);
  const own = rank.role !== "decode" && known(rank.hits) ? `cache hits ${share(rank.hits)}${beside(medians.hits, share)}`
    : rank.role === "decode" && known(rank.fetch_s) ? `KV fetch ${seconds(rank.fetch_s)}${beside(medians.fetch, seconds)}` : "";
  put(parts.own, old ? "" : own);
  const report = rank.age_s === null ? "never reported" : `${rank.running + rank.waiting} reported ${rank.age_s < 2 ? "just now" : `${age(rank.age_s)} ago`}`;
  put(parts.estimate, old ? "" : `${known(rank.taken) ? `${share(rank.taken)} taken: ` : ""}${rank.estimate_requests}${slots} given, ${report}`);
}

// --- many ranks as a heat map ----------------------------------------------------------------------------------------

const GAP = 2;

export class HeatMap {
  constructor(role, choose, say) {
    this.role = role; this.ranks = []; this.cursor = 0; this.choose = choose; this.say = say;
    this.canvas = el("canvas", {
      tabindex: "0", role: "img", keydown: (event) => this.key(event), click: (event) => this.at(event, true),
      mousemove: (event) => this.at(event, false), focus: () => this.paint(), blur: () => this.paint(),
    });
  }

  show(ranks, choice, chosen) {
    Object.assign(this, { ranks, choice, chosen });
    const states = ranks.map((rank) => stateOf(rank).word).filter((word) => word !== "ready");
    this.canvas.setAttribute("aria-label", `${ranks.length} ${this.role} ranks by ${choice}; ${states.length} not well; arrow keys move, Enter opens; the table below has the same figures`);
    this.paint();
  }

  layout() {
    const width = this.canvas.clientWidth || 300, count = Math.max(1, this.ranks.length);
    const least = Math.max(7, Math.min(30, Math.floor(Math.sqrt((width * 300) / count)) - GAP));
    const fit = Math.max(1, Math.floor((width + GAP) / (least + GAP))), instances = new Set(this.ranks.map((rank) => rank.instance)).size;
    const unit = Math.round(count / Math.max(1, instances)), across = unit <= fit ? fit - (fit % unit) : fit;  // whole instances in a row
    const size = Math.min(30, Math.floor((width + GAP) / across) - GAP);
    return { width, size, across, height: Math.ceil(count / across) * (size + GAP) };
  }

  paint() {
    const { width, size, across, height } = this.layout(), ratio = window.devicePixelRatio || 1;
    const { canvas } = this, style = getComputedStyle(canvas), colour = (name) => style.getPropertyValue(`--${name}`).trim();
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const draw = canvas.getContext("2d"), { of, all } = CHOICES[this.choice];
    draw.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw.clearRect(0, 0, width, height);
    const most = Math.max(1e-9, ...this.ranks.map((rank) => of(rank) ?? 0));
    const colours = Object.fromEntries(["track", "one", "warn", "bad", "soft", "text", "box"].map((name) => [name, colour(name)]));
    draw.font = `bold ${Math.max(7, Math.round(0.7 * size))}px sans-serif`;
    draw.textAlign = "center"; draw.textBaseline = "middle";
    this.ranks.forEach((rank, place) => {
      const x = (place % across) * (size + GAP), y = Math.floor(place / across) * (size + GAP);
      const state = stateOf(rank), value = of(rank), level = Math.min(1, (value ?? 0) / (all(rank) ?? most));
      const whole = state.tone === "bad" || state.tone === "warn";  // those that are not well look alike, whatever the figure
      draw.fillStyle = whole ? colours[state.tone] : colours.track;
      draw.fillRect(x, y, size, size);
      if (!whole) {
        draw.globalAlpha = 0.35 + 0.65 * level;
        draw.fillStyle = state.tone === "note" ? colours.soft : colours.one;
        draw.fillRect(x, y + size * (1 - level), size, size * level);
        draw.globalAlpha = 1;
      }
      if (state.mark) {
        draw.lineWidth = 2;
        draw.strokeStyle = colours[state.tone] ?? colours.soft;
        draw.strokeRect(x + 1, y + 1, size - 2, size - 2);
        draw.fillStyle = whole || level > 0.5 ? colours.box : colours.text;
        if (size >= 9) draw.fillText(state.mark, x + size / 2, y + size / 2);
      }
      if (rank.id === this.chosen || (place === this.cursor && document.activeElement === canvas)) {
        draw.lineWidth = 2; draw.strokeStyle = colours.text; draw.strokeRect(x, y, size, size);
      }
    });
  }

  at(event, open) {
    const { size, across } = this.layout(), box = this.canvas.getBoundingClientRect();
    const place = Math.floor((event.clientY - box.top) / (size + GAP)) * across + Math.floor((event.clientX - box.left) / (size + GAP));
    const rank = this.ranks[place];
    if (!rank) return;
    this.canvas.title = this.words(rank);
    if (open) { this.cursor = place; this.choose(rank.id); }
  }

  words(rank) { return `${rank.name}, ${stateOf(rank).word}, ${this.choice} ${CHOICES[this.choice].show(CHOICES[this.choice].of(rank))}`; }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.layout().across, ArrowDown: this.layout().across };
    if (event.key === "Enter" && this.ranks[this.cursor]) this.choose(this.ranks[this.cursor].id);
    else if (event.key in steps) {
      this.cursor = Math.max(0, Math.min(this.ranks.length - 1, this.cursor + steps[event.key]));
      this.say(this.words(this.ranks[this.cursor]));
      this.paint();
    } else return;
    event.preventDefault();
  }
}

// --- charts ----------------------------------------------------------------------------------------------------------

const WIDTH = 400, HEIGHT = 110, LEFT = 0, BOTTOM = 4, TOP = 6;

export function chart(title) {
  const caption = el("figcaption"), picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  const axis = el("p", { class: "axis" }, el("span"), el("span"), el("span", {}, "now")), made = el("figure", { class: "chart" }, caption, picture, axis);
  made.parts = { caption, picture, title, axis };
  return made;
}

// Draw `series` ([name, values] each) over `times`; `limit` is a line with its name; `events` are [time, text, bad].
export function renewChart(made, times, series, { show, limit = 0, note = "", events = [], until, most = 0 }) {
  const { caption, picture, title, axis } = made.parts;
  const from = Math.min(times[0] ?? until, until - 60), across = (time) => LEFT + ((WIDTH - LEFT) * (time - from)) / (until - from);
  const values = series.flatMap(([, its]) => its).filter((value) => value !== null);
  const top = Math.max(most, limit && values.length ? 1.15 * limit : 0, ...values) || 1;
  const up = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  caption.replaceChildren(el("b", {}, title + note), ...series.map(([name, its], place) =>
    el("span", { class: `t${place}` }, `${["━", "╍", "┅"][place]} ${name} ${show(its.at(-1) ?? null)}`)),
    ...(limit ? [el("span", {}, `╌ SLO ${show(limit)}`)] : []));
  const seen = events.filter(([time]) => time >= from);
  const lines = [0, top].map((value) => svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: up(value), y2: up(value) }));
  const marks = seen.slice(-200).map(([time, text, bad]) => {
    const x = across(time), mark = svg("line", { class: bad ? "event bad" : "event", x1: x, x2: x, y1: bad ? TOP : HEIGHT - BOTTOM - 14, y2: HEIGHT - BOTTOM });
    mark.append(svg("title", {}, `${clock(time)} ${text}`));
    return mark;
  });
  const paths = series.map(([, its], place) => {
    let path = "", pen = "M";
    its.forEach((value, at) => {
      if (value === null) { pen = "M"; return; }
      path += `${pen}${across(times[at]).toFixed(1)} ${up(value).toFixed(1)}`;
      pen = "L";
    });
    return svg("path", { class: `k${place}`, d: path || "M0 0" });
  });
  const slo = limit ? [svg("line", { class: "slo", x1: LEFT, x2: WIDTH, y1: up(limit), y2: up(limit) })] : [];
  put(axis.children[0], `${age(Math.round(until - from))} ago`);
  put(axis.children[1], `from 0 to ${show(top)}`);
  picture.replaceChildren(...lines, ...marks, ...slo, ...paths);
}

export function table(heads, rows) {
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, typeof cell === "number" ? number(cell) : cell))))));
}

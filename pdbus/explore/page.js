// The page of a replay: it unpacks the data, and shows them. Text is always set as text.
"use strict";

(async () => {
  const $ = (id) => document.getElementById(id);
  const KINDS = { u8: Uint8Array, i16: Int16Array, u32: Uint32Array, i32: Int32Array, f32: Float32Array };
  const LISTED = 25;

  // An element with attributes (a function is a listener) and children (texts or elements).
  function el(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") made.addEventListener(name, value);
      else made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  // --- the data -------------------------------------------------------------------------------------------------------

  async function unpack(text) {
    const letters = atob(text), bytes = new Uint8Array(letters.length);
    for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
    const all = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
    const length = new DataView(all).getUint32(0, true), head = JSON.parse(new TextDecoder().decode(new Uint8Array(all, 4, length)));
    return { head, column: ([kind, at, count]) => new KINDS[kind](all, 4 + length + at, count) };
  }

  const { head, column } = await unpack($("data").textContent);
  const data = { numbers: column(head.numbers), prompt: column(head.prompt), output: column(head.output), shares: column(head.shares) };
  const fullAt = new Map([...column(head.full)].map((place, at) => [place, at]));
  const runs = head.runs.map((run) => ({
    ...run, ...Object.fromEntries(["ttfts", "tpots", "arrived", "ttft", "tpot", "waited", "cached", "regret", "trip", "here", "there"].map((name) => [name, column(run[name])])),
    legs: run.legs.map((leg) => ({ ...leg, ...Object.fromEntries(["rank", "cost", "next", "next_cost", "queued"].map((name) => [name, column(leg[name])])) })),
    hits: { ...run.hits, share: column(run.hits.share) },
    maps: run.maps.map((map) => ({ ...map, values: column(map.values) })),
  }));
  const count = data.numbers.length, [ttftSlo, tpotSlo] = head.slo;
  const nameOf = (at) => head.rids?.[at] || `#${data.numbers[at]}`;

  // --- words ----------------------------------------------------------------------------------------------------------

  const number = (value) => Math.round(value).toLocaleString("en-US");
  const cost = (value) => (value >= 100 || value === Math.round(value) ? number(value) : String(Number(value.toPrecision(3))));
  const seconds = (value) => (!Number.isFinite(value) ? "–" : Math.abs(value) < 0.9995 ? `${(1e3 * value).toFixed(Math.abs(value) < 0.0995 ? 1 : 0)} ms` : `${value.toFixed(Math.abs(value) < 9.995 ? 2 : 1)} s`);
  const share = (part, whole) => `${((100 * part) / (whole || 1)).toFixed(1)} %`;
  const many = (value, word) => `${number(value)} ${word}${value === 1 ? "" : "s"}`;

  function key(place) {
    const made = el("span", { class: "key", "aria-hidden": "true" });
    Drawing.styled(() => {
      const { line_color: colour, line_dash: dash } = Drawing.look(place);
      made.style.borderTopColor = colour;
      made.style.borderTopStyle = dash === "solid" ? "solid" : dash[0] > 3 ? "dashed" : "dotted";
    });
    return made;
  }

  // --- methods, distributions, loads ------------------------------------------------------------------------------------

  document.title = `pdbus ${head.command}: ${head.title}`;
  $("title").textContent = `pdbus ${head.command}`;
  $("what").textContent = head.title;
  const placeOf = new Map(runs.map((run, place) => [run.name, place]));
  $("methods").append(
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, head.command === "plan" ? "choice" : "method"), ...head.heads.map((each) => el("th", { scope: "col" }, each)))),
    el("tbody", {}, ...head.rows.map(([name, ...cells]) => el("tr", {}, el("td", {}, placeOf.has(name) ? key(placeOf.get(name)) : null, name), ...cells.map((cell, at) => el("td", { "data-head": head.heads[at] }, cell))))));
  $("notes").append(...head.notes.map((note) => el("li", {}, note)), el("li", {}, `Made by pdbus ${head.version}. This file loads and sends nothing.`));
  await new Promise((done) => { setTimeout(done); });  // the table is shown before figures are drawn

  const positive = (values) => values.map((value) => Math.max(value, 1e-4));
  Drawing.curves($("ttft"), runs.map((run, place) => [place, positive(run.ttfts), data.shares]), { seconds: true, limit: ttftSlo, y_range: [0, 1] });
  const decoding = runs.filter((run) => run.tpots.length);
  if (decoding.length) Drawing.curves($("tpot"), decoding.map((run) => [placeOf.get(run.name), positive(run.tpots).map((value) => 1e3 * value), data.shares]), { seconds: true, limit: 1e3 * tpotSlo, y_range: [0, 1] });
  else $("tpot").textContent = "No rank decoded.";
  if (head.loads) {
    const lines = head.loads.lines;
    $("loads-figure").hidden = false;
    $("loads-x").replaceChildren(`Share of requests within ${seconds(ttftSlo)} to the first token and ${seconds(tpotSlo)} for each other, over ${head.loads.x}: `,
      ...lines.flatMap(([name], place) => [key(place), `${name}  `]));
    Drawing.curves($("loads"), lines.map(([, points], place) => [place, points.map(([x]) => x), points.map(([, kept]) => kept)]), { markers: true, y_range: [0, 1.02] });
  } else {
    $("loads-note").textContent = "There was one load, so there is no such figure; several --concurrency draw it, and --keep.";
  }

  // --- ranks over time --------------------------------------------------------------------------------------------------

  const timed = runs.flatMap((run) => run.maps), began = Math.min(...runs.map((run) => run.began));
  const until = Math.max(began + 1, ...runs.flatMap((run) => run.maps.map((map) => run.began + (map.values.length / map.rows) * map.step)));
  const most = { tokens: 0, requests: 0 };
  for (const map of timed) most[map.unit] = map.values.reduce((a, b) => Math.max(a, b), most[map.unit]);
  const ramp = el("span", { class: "ramp", "aria-hidden": "true" });
  Drawing.styled(() => { ramp.style.background = `linear-gradient(90deg, ${Drawing.ramp().join(", ")})`; });
  $("scale").append("Each row is a rank. ", `Where prompts are computed, up to ${number(Drawing.FEW_TOKENS)} queued tokens`, ramp, `${number(most.tokens)}`,
    ...(most.requests ? [`; where it is decoded, 0 to ${many(most.requests, "request")}.`] : ["."]), " The cursor follows the pointer, and the arrow keys on the slider.");
  const captions = [], cursor = Drawing.cursor((at) => { if (Number.isFinite(at)) setTime(at); });
  runs.forEach((run, place) => {
    const words = el("p", {}), maps = el("div", { class: "maps" });
    captions.push([run, words]);
    $("maps").append(el("div", { class: "run" }, el("h3", {}, key(place), run.name), words, maps));
    for (const map of run.maps) {
      const host = el("div");
      maps.append(el("figure", {}, el("figcaption", {}, `${map.ranks} ${map.role} ranks, ${map.unit === "tokens" ? "prompt tokens queued" : "requests"}`), host));
      Drawing.whenSeen(host, Drawing.heightOf(map.rows), () => cursor.add(Drawing.heatMap(host, { ...map, began: run.began, until, most: most[map.unit], tokens: map.unit === "tokens" })));
    }
  });
  const hits = runs.map((run, place) => [place, run.hits.share.map((_, at) => run.began + (at + 0.5) * run.hits.width), run.hits.share]);
  Drawing.whenSeen($("hits"), 200, () => cursor.add(Drawing.curves($("hits"), hits, { x_range: [began, until], y_range: [0, 1], height: 200 })));
  let time = began, drawing = false;
  Object.assign($("time"), { min: began, max: until, step: (until - began) / 1000, value: began });
  $("time").addEventListener("input", () => setTime(Number($("time").value)));

  function setTime(at) {
    time = Math.max(began, Math.min(until, at));
    if (drawing) return;
    drawing = true;
    requestAnimationFrame(() => {
      drawing = false;
      cursor.set(time);
      $("time").value = time;
      $("now").textContent = `${time.toFixed(1)} s`;
      for (const [run, words] of captions) words.textContent = run.maps.map((map) => loadAt(run, map)).join("; ");
    });
  }

  function loadAt(run, map) {
    const columns = map.values.length / map.rows, at = Math.floor((time - run.began) / map.step);
    if (at < 0 || at >= columns) return `${map.role}: the run was over`;
    let sum = 0, top = 0;
    for (let row = 0; row < map.rows; row++) {
      const value = map.values[row * columns + at];
      sum += value * Math.min(map.per_row, map.ranks - row * map.per_row);
      if (value > map.values[top * columns + at]) top = row;
    }
    return `${map.role}: ${number(sum)} ${map.unit}, most at ${map.role}/${top * map.per_row} (${number(map.values[top * columns + at])})`;
  }
  setTime(began);

  // --- two methods ------------------------------------------------------------------------------------------------------

  let chosen = null, order = [], listed = LISTED;
  const cloud = Drawing.cloud($("cloud"), (place) => show(inCloud[place]));
  let inCloud = [];
  for (const [id, place] of [["one", 0], ["other", Math.min(1, runs.length - 1)]]) {
    $(id).append(...runs.map((run, at) => el("option", { value: at }, run.name)));
    $(id).value = place;
    $(id).addEventListener("change", () => compare());
  }
  $("two").hidden = runs.length < 2;
  const pair = () => [runs[$("one").value], runs[$("other").value]];

  function compare() {
    const [one, other] = pair(), by = new Float32Array(count);
    let sooner = 0, later = 0, both = 0, elsewhere = 0;
    inCloud = [];
    for (let at = 0; at < count; at++) {
      by[at] = Math.abs(one.ttft[at] - other.ttft[at]);
      if (runs.length < 2) by[at] = one.ttft[at];
      if (Number.isNaN(by[at])) { by[at] = -1; continue; }
      both++;
      sooner += one.ttft[at] < other.ttft[at];
      later += one.ttft[at] > other.ttft[at];
      elsewhere += placesOf(one, at) !== placesOf(other, at);
      inCloud.push(at);
    }
    order = [...Array(count).keys()].sort((a, b) => by[b] - by[a] || a - b);
    if (runs.length > 1) {
      $("differ").textContent = `Of ${many(both, "request")}, ${one.name} had the first token sooner in ${number(sooner)} (${share(sooner, both)}) and later in ${number(later)} (${share(later, both)}) than ${other.name}; ${number(elsewhere)} went to other ranks.`;
      $("cloud-title").textContent = `Seconds to the first token: ${one.name} from left to right, ${other.name} upwards. Above the line ${one.name} was sooner. A click on a point shows the request.`;
      cloud.show(positive(inCloud.map((at) => one.ttft[at])), positive(inCloud.map((at) => other.ttft[at])));
    }
    $("order").textContent = runs.length > 1 ? "those first in which the two methods differ most" : "those first whose first token took longest";
    listed = LISTED;
    list();
    if (chosen !== null) mark();
  }

  const placesOf = (run, at) => run.legs.filter((leg) => leg.rank[at] >= 0).map((leg) => `${leg.role}/${leg.rank[at]}`).join(" → ");

  // --- requests ---------------------------------------------------------------------------------------------------------

  function list() {
    const [one, other] = pair(), two = runs.length > 1, wanted = $("find").value.trim().toLowerCase();
    const found = wanted ? order.filter((at) => nameOf(at).toLowerCase().includes(wanted)) : order;
    const heads = ["request", "arrived", "prompt", "output", `TTFT ${one.name}`, ...(two ? [`TTFT ${other.name}`, "differ by"] : []), `ranks ${one.name}`, ...(two ? [`ranks ${other.name}`] : [])];
    const wide = (place) => ((place > 0 && place < 4) || place > (two ? 6 : 4) ? { class: "wide" } : {}), cell = (place) => ({ ...wide(place), ...(place ? { "data-head": heads[place] } : {}) });
    $("list").replaceChildren(
      el("thead", {}, el("tr", {}, ...heads.map((text, place) => el("th", { scope: "col", ...wide(place) }, text)))),
      el("tbody", {}, ...found.slice(0, listed).map((at) => {
        const first = (run) => el("span", run.ttft[at] > ttftSlo ? { class: "late" } : {}, seconds(run.ttft[at]), run.ttft[at] > ttftSlo ? " ▲" : "");
        const cells = [el("button", { type: "button", "data-at": at, click: () => show(at, true) }, nameOf(at)), `${one.arrived[at].toFixed(1)} s`, number(data.prompt[at]), number(data.output[at]), first(one),
          ...(two ? [first(other), seconds(Math.abs(one.ttft[at] - other.ttft[at]))] : []), placesOf(one, at) || "–", ...(two ? [placesOf(other, at) || "–"] : [])];
        return el("tr", at === chosen ? { class: "chosen" } : {}, ...cells.map((each, place) => el("td", cell(place), each)));
      })));
    $("more").hidden = found.length <= listed;
    $("shown").textContent = `${number(Math.min(listed, found.length))} of ${many(found.length, "request")}; ▲ is later than the SLO of ${seconds(ttftSlo)}`;
  }

  $("find").addEventListener("input", () => { listed = LISTED; list(); });
  $("more").addEventListener("click", () => {
    const from = listed;
    listed += LISTED;
    list();
    $("list").querySelectorAll("td button")[from]?.focus();
  });

  function mark() {
    const [one, other] = pair();
    if (runs.length > 1) cloud.mark(one.ttft[chosen], other.ttft[chosen]);
  }

  // Show the decisions for a request; `focus` goes there, where it was chosen by its button.
  function show(at, focus = false) {
    const before = document.activeElement?.dataset?.at;
    chosen = at;
    list();
    mark();
    const arrived = runs[0].arrived[at];
    if (Number.isFinite(arrived)) setTime(arrived);
    const full = fullAt.get(at), host = $("request");
    const close = () => {
      host.hidden = true;
      chosen = null;
      list();
      ($("list").querySelector(`[data-at="${before}"]`) ?? $("find")).focus();
    };
    host.hidden = false;
    host.replaceChildren(
      el("header", {}, el("h2", { id: "request-title" }, `Request ${nameOf(at)}`), el("button", { type: "button", click: close }, "Close")),
      el("p", { class: "soft" }, `${many(data.prompt[at], "prompt token")}, ${many(data.output[at], "output token")}. ${full === undefined ? "Of its decisions the ranks chosen and the next best are here." : "Its decisions are here in full."}`),
      el("div", { class: "cards" }, ...runs.map((run, place) => card(run, place, at, full))));
    host.scrollIntoView({ block: "nearest" });
    if (focus) host.focus({ preventScroll: true });
  }

  function card(run, place, at, full) {
    const title = el("h3", {}, key(place), run.name);
    if (Number.isNaN(run.ttft[at])) return el("div", { class: "card" }, title, el("p", {}, "In this run it does not count."));
    const late = (value, limit) => (value > limit ? el("span", { class: "late" }, ` ▲ SLO ${seconds(limit)}`) : null);
    const rows = [
      ["first token", el("span", {}, seconds(run.ttft[at]), late(run.ttft[at], ttftSlo))],
      ["each after", el("span", {}, seconds(run.tpot[at]), late(run.tpot[at], tpotSlo))],
      ["at controller", run.waited[at] >= 0.001 ? `waited ${seconds(run.waited[at])}` : "sent on at once"],
      ...run.legs.filter((leg) => leg.rank[at] >= 0).map((leg) => [`${leg.role} rank`, decision(leg, at)]),
      ["cached", `${number(run.cached[at])} of ${many(data.prompt[at], "prompt token")}`],
      ...(run.regret[at] >= 0 ? [["regret", run.regret[at] ? `${number(run.regret[at])} tokens more before its first than at the best rank` : "none: no rank was better"]] : []),
      ["trip", head.trips[run.trip[at]] ?? "–"],
      ["predicted", predicted(run, at)],
    ];
    const why = full === undefined ? null : el("ul", { class: "why", "aria-label": "the whole decision" }, ...run.why[full].map((each) => el("li", {}, each)));
    return el("div", { class: "card" }, title, el("dl", {}, ...rows.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])), why);
  }

  function decision(leg, at) {
    const truly = leg.queued[at] < 0 ? "" : leg.role === "decode" ? `; truly ${many(leg.queued[at], "request")}` : `; truly ${many(leg.queued[at], "token")} queued`;
    if (Number.isNaN(leg.cost[at])) return `${leg.role}/${leg.rank[at]}, ${leg.method} compares no costs${truly}`;
    const next = leg.next[at] < 0 ? "" : `; next best ${leg.role}/${leg.next[at]}, ${cost(leg.next_cost[at])}`;
    return `${leg.role}/${leg.rank[at]}, ${cost(leg.cost[at])} ${leg.unit} by ${leg.method}${next}${truly}`;
  }

  function predicted(run, at) {
    if (Number.isNaN(run.here[at])) return "not considered by this method";
    const there = Number.isFinite(run.there[at]) ? `, ${seconds(run.there[at])} as a pair` : "";
    return `first token after ${seconds(run.here[at])} at one rank${there}; true ${seconds(run.ttft[at] - run.waited[at])}`;
  }

  compare();
  document.documentElement.dataset.drawn = "true";
})();

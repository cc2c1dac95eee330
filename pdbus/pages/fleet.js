// The fleet's page: what it shows of the messages, and what a user may choose.

import { $, HeatMap, chart, el, put, renewChart, renewTile, table, tile } from "./fleet-draw.js";
import { CHOICES, CONDITIONS, DEAD, Fleet, age, byName, bytes, clock, counted, isOld, kvShare, number, reportedAt, seconds, share, stateOf } from "./fleet-state.js";
import { Requests } from "./fleet-requests.js";
import { watch } from "./fleet-stream.js";

const MANY = 100, ROWS = 12, MORE_ROWS = 50, ROLES = ["prefill", "decode", "unified"];
const COLUMNS = ["taken", "busy", "running", "waiting", "KV memory in use", "step time", "KV fetch", "cache hits", "age of report", "prompt tokens/s", "output tokens/s", "TTFT p99", "failed"];
const MAIN = new Set(COLUMNS.slice(0, 9));

// The word before a sentence of each kind, and the mark of how bad it is.
const KINDS = { unserved: "none", dead: "rank", broker: "broker", failing: "lost", queue: "waits", slo: "late", slow: "slow", full: "full", link: "link", cold: "cold", note: "note" };
const MARKS = { bad: "✕", late: "◆", warn: "▲", note: "" };

const fleet = new Fleet();
const choice = { figure: "busy or taken", rank: null, rows: ROWS, sort: "state", up: false, find: "" };
const boxes = {};
let trouble = "", series = null, seriesAt = 0, end = null, hint = "";

const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
const keyOf = () => token || sessionStorage.getItem("pdbus-key") || "";

function open(id) {
  choice.rank = choice.rank === id ? null : id;
  series = null;
  draw();
  if (choice.rank !== null) {
    loadSeries();
    $("detail").scrollIntoView({ block: "nearest" });
  }
}

// --- the verdict -----------------------------------------------------------------------------------------------------

function summary() {
  const ranks = [...fleet.ranks.values()], states = byState(ranks);
  const parts = [...states].filter(([state]) => state !== "ready").map(([state, some]) => `${some.length} ${state}`);
  const ready = states.get("ready")?.length ?? 0, waits = total(ranks, "waiting");
  const failing = fleet.now("failed_s");
  return `${ready} of ${counted(ranks.length, "rank")} ready${parts.length ? ` (${parts.join(", ")})` : ""}, `
    + `${number(fleet.now("done_s"))} requests/s done, ${number(failing)}/s failed or refused, ${number(fleet.head.live)} live, `
    + `${number(waits)} waiting at ranks, ${number(fleet.head.waiting)} in the queue`;
}

// The sum of a figure over the ranks that serve: the last figures of others are not of now.
const total = (ranks, name) => ranks.reduce((sum, rank) => sum + (isOld(rank) ? 0 : rank[name] ?? 0), 0);

function byState(ranks) {
  const found = new Map();
  for (const rank of ranks) found.set(rank.state, [...(found.get(rank.state) ?? []), rank]);
  return found;
}

function verdict() {
  const { head } = fleet, lines = head.lines ?? [], [level, words] = head.headline ?? ["well", "All is well"];
  const silent = trouble || head.silent, box = $("verdict");
  const kind = silent && (trouble || fleet.seq >= 0) ? "bad" : fleet.seq < 0 ? "wait" : level;
  if (box.className !== kind) box.className = kind;
  const [headline, list] = [box.querySelector(".headline"), box.querySelector("ul")];
  put(headline, silent ? `✕ ${upper(silent)}` : `${MARKS[level] ?? "✓"} ${words}`);
  const key = JSON.stringify([lines.map(([level, which, , id]) => [level, which, id]), silent]);
  if (list.dataset.shown === key) lines.forEach(([, , text], place) => put(list.children[place].lastChild, `${text}.`));  // it keeps the focus
  else {
    list.dataset.shown = key;
    list.replaceChildren(...lines.map(([level, which, text, id]) => el("li", {}, el("span", { class: `mark ${level}` }, `${MARKS[level]} ${KINDS[which]}`.trim()), " ",
      id === null ? el("span", {}, `${text}.`) : el("button", { type: "button", click: () => open(id) }, `${text}.`))), el("li", { class: "summary" }));
  }
  if (fleet.seq < 0) return;
  put(list.querySelector(".summary"), summary());
  if (fleet.wall) put($("clock"), `${silent ? "as of " : ""}${clock(fleet.wall)}`);
}

const upper = (text) => text[0].toUpperCase() + text.slice(1);

// --- prefill, decode, unified ----------------------------------------------------------------------------------------

function box(role, ranks, many) {
  const host = $(role), body = host.querySelector(".body"), ready = ranks.filter((rank) => rank.state === "ready").length;
  const add = (name) => total(ranks, name), slots = add("max_running");
  const kv = ranks.filter((rank) => !isOld(rank)).map(kvShare).filter((value) => value !== null);
  const words = [`${ready} of ${counted(ranks.length, "rank")} ready`];
  for (const state of DEAD) {
    const count = ranks.filter((rank) => rank.state === state).length;
    if (count) words.push(`${count} ${state}`);
  }
  for (const [condition, word] of Object.entries(CONDITIONS)) {
    const count = ranks.filter((rank) => rank.condition === condition).length;
    if (count) words.push(`${count} ${word}`);
  }
  words.push(`${number(add("running"))}${slots ? ` of ${number(slots)}` : ""} running`, `${number(add("waiting"))} waiting`);
  if (kv.length) words.push(`KV ${share(kv.reduce((sum, value) => sum + value, 0) / kv.length)} in use`);
  put(host.querySelector(".sum"), words.join(", "));
  const mode = many ? "map" : ranks.map((rank) => `${rank.id}${rank.instance}${rank.host}`).join();
  if (boxes[role]?.mode !== mode) {
    boxes[role] = { mode };
    if (many) {
      boxes[role].map = new HeatMap(role, open, (text) => { hint = text; legend(true); });
      body.replaceChildren(boxes[role].map.canvas);
    } else tiles(boxes[role], body, ranks);
  }
  if (many) boxes[role].map.show(ranks, choice.figure, choice.rank);
  else for (const rank of ranks) renewTile(boxes[role].tiles.get(rank.id), rank, fleet, choice.rank);
}

function tiles(its, body, ranks) {
  its.tiles = new Map(ranks.map((rank) => [rank.id, tile(rank, open)]));
  const groups = new Map(), sizes = new Map();
  for (const rank of ranks) sizes.set(rank.instance, (sizes.get(rank.instance) ?? 0) + 1);
  for (const rank of ranks) {
    const name = sizes.get(rank.instance) === 1 ? "" : `${rank.instance}${rank.host ? ` on ${rank.host}` : ""}`;
    its.tiles.get(rank.id).lone = !name;
    groups.set(name, [...(groups.get(name) ?? []), rank]);
  }
  body.replaceChildren(...[...groups].map(([name, some]) => el("div", { class: "group" }, name ? el("h3", {}, name) : null,
    el("div", { class: "tiles" }, ...some.map((rank) => its.tiles.get(rank.id))))));
}

function queue() {
  const { head } = fleet, its = head.queue, waits = head.waiting ?? 0;
  const short = [...new Set((its?.kinds ?? []).flatMap(([, , , , roles]) => roles))];
  put($("queue").querySelector(".sum"), its === null ? (waits ? `${waits} wait (it is not said which)` : "nothing waits")
    : waits ? `${counted(waits, "request")} wait${waits === 1 ? "s" : ""}, the first for ${age(its?.oldest_s ?? null)}; no room: ${short.join(", ")}` : "nothing waits");
  const body = $("queue").querySelector(".body");
  const key = JSON.stringify(its && waits ? [its.kinds, its.priorities, its.keys] : []);
  if (body.dataset.shown === key) return;
  body.dataset.shown = key;
  if (!its || !waits) { body.replaceChildren(); return; }
  const kinds = its.kinds.map(([model, roles, requests, pinned]) => [`${roles.join(", then ")}${model ? ` of ${model}` : ""}${pinned ? " (chosen)" : ""}`, requests]);
  body.replaceChildren(table(["need", "requests"], kinds),
    ...(its.priorities.length > 1 ? [table(["priority", "requests"], its.priorities.map(([priority, requests]) => [String(priority), requests]))] : []),
    ...(its.keys.some(([name]) => name) ? [table(["key", "requests"], its.keys.map(([name, requests]) => [name || "(none)", requests]))] : []));
}

const TAKEN = "Taken: of run slots by the requests given, or of KV memory by live and awaited tokens, whichever is more.";

function legend(many) {
  const host = $("legend"), mode = `${many}${hint}`;
  if (host.dataset.mode === mode) return;
  host.dataset.mode = mode;
  if (many) host.replaceChildren(hint || "A rank is a cell, filled by the chosen figure, and wholly where it is not well: ✕ lost, hung or silent, S slow, F full, L slow link, C cold cache; small letters: its state. Click one, or move with the arrow keys. ", TAKEN);
  else host.replaceChildren("KV memory:", ...[["live", "of live requests"], ["kept", "kept for other ranks"], ["cached", "cache that can be given up"]]
    .flatMap(([kind, text]) => [el("span", { class: `swatch ${kind}` }), text]), ". Median: of its role and model. Given: the requests that the controller has sent there, those on their way too. ", TAKEN);
}

// --- one rank --------------------------------------------------------------------------------------------------------

const get = (path) => fetch(path, { headers: keyOf() ? { Authorization: `Bearer ${keyOf()}` } : {}, cache: "no-store" });

async function loadSeries() {
  const rank = fleet.ranks.get(choice.rank);
  if (!rank || document.hidden) return;
  seriesAt = performance.now();
  try {
    const response = await get(`/fleet/rank/${encodeURIComponent(rank.instance)}/${rank.dp_rank}`);
    if (response.ok && choice.rank === rank.id) { series = await response.json(); detail(); }
  } catch { /* the stream says what is wrong */ }
}

function detail() {
  const host = $("detail"), rank = fleet.ranks.get(choice.rank);
  host.hidden = !rank;
  if (!rank) { host.replaceChildren(); delete host.dataset.rank; return; }
  if (host.dataset.rank !== String(rank.id)) {
    host.dataset.rank = rank.id;
    host.charts = ["requests", "KV memory (tokens)", "step time", "tokens/s"].map(chart);
    const grid = el("div", { id: "rank-charts" });
    grid.append(...host.charts);
    host.replaceChildren(el("header", {}, el("h2", {}, rank.name), el("p", { class: "what" }), el("button", { type: "button", click: () => open(rank.id) }, "Close")), el("dl"), grid);
  }
  const state = stateOf(rank), why = (fleet.head.lines ?? []).filter(([, , , id]) => id === rank.id).map(([, , text]) => text).join("; ");
  put(host.querySelector(".what"), `${rank.role} rank of ${rank.model}, ${state.word}${rank.since ? ` since ${clock(rank.since)}` : ""}${why ? `. ${why}` : ""}${isOld(rank) ? `. What follows is as it last reported, ${reportedAt(rank, fleet.wall)}` : ""}`);
  host.classList.toggle("old", isOld(rank));
  const facts = [["host", rank.host || "this machine"], ["restarts", number(rank.restarts)], ...Object.entries(CHOICES).map(([name, { of, show }]) => [name, show(of(rank) ?? null)]),
    ["run slots", number(rank.max_running)], ["KV memory", `${number(rank.kv_capacity)} tokens`], ["live", `${number(rank.kv_live)} tokens`], ["kept for others", `${number(rank.kv_pinned)} tokens`],
    ["in its cache", `${number(rank.kv_cached)} tokens`], ["estimated tokens", number(rank.estimate_tokens)], ["TTFT p50", seconds(rank.ttft_p50_s)], ["TPOT p50", seconds(rank.tpot_p50_s)], ["KV received/s", bytes(rank.kv_received_bytes_s)]];
  const list = host.querySelector("dl");
  if (list.children.length !== facts.length) list.replaceChildren(...facts.map(([name]) => el("div", {}, el("dt", {}, name), el("dd"))));
  facts.forEach(([, value], place) => put(list.children[place].lastChild, value));
  if (!series) return;
  const times = series.at, until = times.at(-1), given = (name) => series[name];
  const drawn = [[["estimate", given("estimate_requests")], ["running", given("running")], ["waiting", given("waiting")]], [["live", given("kv_tokens")], ["kept", given("kv_pinned")], ["cached", given("kv_cached")]],
    [["step", given("step_s")]], [["prompt", given("prompt_s")], ["output", given("output_s")]]];
  drawn.forEach((its, place) => renewChart(host.charts[place], times, its, { show: place === 2 ? seconds : number, until }));
}

// --- the table -------------------------------------------------------------------------------------------------------

function ranksTable(ranks) {
  const body = $("table").tBodies[0], heads = $("table").tHead, odd = (rank) => (stateOf(rank).mark ? 1 : 0);
  const by = choice.sort === "state" ? [odd, CHOICES[choice.figure].of] : [CHOICES[choice.sort].of];
  const found = ranks.sort(byName).filter((rank) => rank.name.includes(choice.find) || rank.host.includes(choice.find) || stateOf(rank).word.includes(choice.find));
  found.sort((a, b) => (choice.up ? 1 : -1) * (by.map((of) => (of(a) ?? -1) - (of(b) ?? -1)).find(Boolean) ?? 0));
  if (!heads.rows.length || heads.dataset.sort !== choice.sort + choice.up) {
    heads.dataset.sort = choice.sort + choice.up;
    heads.replaceChildren(el("tr", {}, el("th", { scope: "col" }, "rank"), ...["state", ...COLUMNS].map((name) =>
      el("th", { scope: "col", class: kindOf(name), "aria-sort": name === choice.sort ? (choice.up ? "ascending" : "descending") : "none" },
        el("button", { type: "button", click: () => { choice.up = choice.sort === name && !choice.up; choice.sort = name; draw(); } }, `${name}${name === choice.sort ? (choice.up ? " ▲" : " ▼") : ""}`)))));
  }
  const some = found.slice(0, choice.rows);
  while (body.rows.length > some.length) body.lastChild.remove();
  while (body.rows.length < some.length)
    body.append(el("tr", {}, el("td", {}, el("button", { type: "button", click: (event) => open(Number(event.currentTarget.dataset.id)) })), el("td"), ...COLUMNS.map(() => el("td"))));
  const kinds = COLUMNS.map(kindOf);
  some.forEach((rank, place) => {
    const cells = body.rows[place].cells, name = cells[0].firstChild, state = stateOf(rank);
    name.dataset.id = rank.id;
    put(name, rank.name);
    put(cells[1], `${state.mark} ${state.word}`.trim());
    body.rows[place].className = isOld(rank) ? "old" : "";
    COLUMNS.forEach((column, at) => {
      if (cells[2 + at].className !== kinds[at]) cells[2 + at].className = kinds[at];
      put(cells[2 + at], CHOICES[column].show(CHOICES[column].of(rank) ?? null));
    });
  });
  put($("shown"), `${some.length} of ${counted(found.length, "rank")}`);
  $("more").hidden = some.length === found.length;
}

// How wide a page must be to have the column.
const kindOf = (name) => (name === choice.sort || name === "state" ? "" : MAIN.has(name) ? "main" : "minor");

// --- charts and events -----------------------------------------------------------------------------------------------

const CHARTS = ["Requests/s", "Tokens/s", "Time to first token", "Time per output token", "KV moved", "KV memory in use", "Live and waiting"].map((title) => [title, chart(title)]);

function charts() {
  const times = fleet.column("wall"), until = times.at(-1) ?? fleet.wall, col = (name) => fleet.column(name), { head } = fleet;
  const events = fleet.news.map(([wall, text, bad, , about]) => [wall, `${about}: ${text}`, bad]);
  const slo = head.slo ? `: ${head.slo[0]} kept their SLO in the last minute, ${head.slo[1]} missed it` : "";
  const kv = ROLES.filter((role) => fleet.now(`kv_${role}`) !== null).map((role) => [role, col(`kv_${role}`)]);
  const drawn = [
    [[["done", col("done_s")], ["failed or refused", col("failed_s")]], { show: number }],
    [[["output", col("output_s")], ["prompt", col("prompt_s")], ["from caches", col("cached_s")]], { show: number }],
    [[["p50", col("ttft_p50_s")], ["p99", col("ttft_p99_s")]], { show: seconds, limit: head.ttft_slo_s, note: slo }],
    [[["p50", col("tpot_p50_s")], ["p99", col("tpot_p99_s")]], { show: seconds, limit: head.tpot_slo_s }],
    [[["sent/s", col("kv_sent_bytes_s")]], { show: bytes }],
    [kv, { show: share, most: 1 }],
    [[["live", col("requests")], ["in the queue", col("queued")]], { show: number }],
  ];
  drawn.forEach(([its, options], place) => renewChart(CHARTS[place][1], times, its, { ...options, events, until }));
  const marked = events.filter(([time, , bad]) => bad && time >= Math.min(times[0] ?? until, until - 60)).slice(-3).reverse();
  put($("marks"), marked.map(([time, text]) => `┃ ${clock(time)} ${text.split(": ").slice(0, 2).join(": ")}`).join("   "));
  $("marks").hidden = !marked.length;
}

function events() {
  const host = $("events"), latest = fleet.news.slice(-100).reverse(), key = JSON.stringify([latest[0], latest.length, fleet.head.events]);
  if (host.dataset.shown === key) return;
  host.dataset.shown = key;
  const none = fleet.head.events === false && fleet.head.loads ? "This controller is older than this page, and keeps no events." : "Nothing has happened yet.";
  host.replaceChildren(...(latest.length ? latest.map(([wall, text, bad, , about]) =>
    el("li", bad ? { class: "bad" } : {}, el("time", {}, clock(wall)), " ", el("span", { class: "about" }, `${bad ? "✕ " : ""}${about}`), ` ${text}`)) : [el("li", {}, none)]));
}

function failed() {
  const host = $("failed"), { failed: codes = [], refused = [] } = fleet.head, key = JSON.stringify([codes, refused]);
  if (host.dataset.shown === key) return;
  host.dataset.shown = key;
  const rows = [...codes.map(([code, count]) => [`failed: ${code}`, count]), ...refused.map(([code, count]) => [`refused: ${code}`, count])];
  host.replaceChildren(...(rows.length ? [table(["since the controller began", "times"], rows), el("p", { class: "note" }, "Failed: requests that ended with this code, those refused as overloaded or too_many among them. Refused: messages and connections that were not taken.")] : ["Nothing failed, and nothing was refused."]));
}

// --- one request -----------------------------------------------------------------------------------------------------

const requests = new Requests(fleet, async (rid) => {
  let response;
  try {
    response = await get(`/fleet/request/rid=${encodeURIComponent(rid)}`);
  } catch {
    throw new Error("the page server does not answer");
  }
  const body = await response.json();
  if (!response.ok) throw new Error(body.error.message);
  return body;
});

// --- all of it -------------------------------------------------------------------------------------------------------

function draw() {
  verdict();
  if (fleet.seq < 0 || !fleet.head.controller) return;
  const { head } = fleet, ranks = [...fleet.ranks.values()], many = ranks.length >= MANY;
  put($("where"), `${head.controller}, up ${age(head.uptime_s)}${Object.entries(head.methods).filter(([role]) => fleet.of(role).length).map(([role, method]) => `, ${role} ranks chosen by ${method}`).join("")}`);
  queue();
  const alone = ranks.length > 0 && ranks.every((rank) => rank.role === "unified");
  $("flow").className = `${alone ? "alone" : ""}${head.waiting ? "" : " calm"}`.trim();
  for (const role of ROLES) {
    const its = fleet.of(role);
    $(role).hidden = alone ? role !== "unified" : role === "unified" && !its.length;
    if (!$(role).hidden) box(role, its, many);
  }
  $("kv").hidden = alone;
  put($("to-prefill").querySelector("b"), `${number(fleet.now("prompt_s"))} tokens/s`);
  put($("kv").querySelector("b"), `KV ${bytes(fleet.now("kv_sent_bytes_s"))}/s`);
  put($("out").querySelector("b"), `${number(fleet.now("output_s"))} tokens/s`);
  legend(many);
  detail();
  if (choice.rank !== null && performance.now() - seriesAt > 10_000) loadSeries();
  $("many").hidden = !many;
  if (many) ranksTable(ranks);
  charts();
  requests.draw();
  events();
  failed();
}

function begin() {
  end?.();
  end = watch("/fleet/stream", keyOf(), (name, body) => {
    trouble = "";
    $("door").hidden = true;
    if (fleet.apply(name, body)) draw();
  }, (sentence, status) => {
    trouble = sentence;
    $("door").hidden = status !== 401 || Boolean(token);
    verdict();
  });
}

$("charts").append(...CHARTS.map(([, made]) => made));
$("figure").append(...Object.keys(CHOICES).map((name) => el("option", {}, name)));
$("figure").addEventListener("change", () => { choice.figure = choice.sort = $("figure").value; hint = ""; draw(); });
$("find").addEventListener("input", () => { choice.find = $("find").value; choice.rows = ROWS; draw(); });
$("more").addEventListener("click", () => { choice.rows += MORE_ROWS; draw(); });
$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("pdbus-key", $("key").value);
  begin();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if ($("request").contains(document.activeElement) || choice.rank === null) requests.close();
  else open(choice.rank);
});
window.addEventListener("resize", draw);
begin();

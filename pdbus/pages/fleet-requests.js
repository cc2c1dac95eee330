// The requests on a fleet's page: the lists to look at first, a look-up, and one request with its steps and why its
// ranks were chosen.

import { $, el, put } from "./fleet-draw.js";
import { age, clock, number, seconds } from "./fleet-state.js";

const LISTS = {
  running: ["Running longest", "No request is at a rank."],
  waiting: ["Waiting longest", "No request waits in the queue."],
  slowest: ["Slowest to the first token", "No first token has come in the last 15 minutes."],
};
const HEADS = ["request", "", "time to first token", "ranks", "prompt tokens", "attempt", "model"];
const WHEN = { running: "came", waiting: "has waited for", slowest: "came at" };
const OLD = "This controller is older than this page";

export class Requests {
  // `ask(rid)` gives the JSON of one request, or throws an Error with a sentence.
  constructor(fleet, ask) {
    this.fleet = fleet; this.ask = ask; this.list = null; this.rid = null; this.shown = "";
    $("lists").append(...Object.entries(LISTS).map(([list, [name]]) =>
      el("button", { type: "button", "data-list": list, click: () => { this.list = list; this.draw(); } }, name)));
    $("look").addEventListener("submit", (event) => { event.preventDefault(); this.look($("rid").value.trim()); });
  }

  draw() {
    if (this.fleet.seq >= 0) this.list ??= this.fleet.head.waiting && this.fleet.requests.waiting?.length ? "waiting" : "running";  // the user's choice from then on
    const rows = this.fleet.requests[this.list] ?? [], { head } = this.fleet;
    for (const button of $("lists").children) button.setAttribute("aria-pressed", String(button.dataset.list === this.list));
    const none = !head.requests ? (head.loads ? `${OLD}, and lists no requests; look one up.` : "") : rows.length ? "" : LISTS[this.list][1];
    put($("no-requests"), none);
    $("no-requests").hidden = !none;
    const key = JSON.stringify([this.list, rows, this.rid]);
    if (this.shown !== key) {
      this.shown = key;
      const focused = $("listed").contains(document.activeElement) ? document.activeElement.textContent : null;
      $("listed").replaceChildren(...(rows.length ? [heading(WHEN[this.list]), el("tbody", {}, ...rows.map((row) => this.row(row)))] : []));
      if (focused !== null) [...$("listed").querySelectorAll("button")].find((each) => each.textContent === focused)?.focus();
    }
    for (const cell of $("listed").querySelectorAll("[data-came]"))
      put(cell, this.list === "slowest" ? clock(cell.dataset.came) : `${age(Math.max(0, Math.round(this.fleet.wall - cell.dataset.came)))}${this.list === "running" ? " ago" : ""}`);
  }

  row({ rid, came, first_token_s: first, model, prompt_tokens: prompt, attempt, ranks, late }) {
    const cells = [el("button", { type: "button", click: () => this.look(rid) }, rid), null,
      first === null ? (late ? "▲ late" : "none yet") : `${seconds(first)}${late ? " ▲ late" : ""}`, ranks.join(" → ") || "–", number(prompt), String(attempt), model || "–"];
    return el("tr", rid === this.rid ? { class: "chosen" } : {}, ...cells.map((cell, place) =>
      place === 1 ? el("td", { "data-came": came }) : el("td", place > 3 ? { class: place === 4 ? "main" : "minor" } : {}, cell)));
  }

  // Show one request, or the sentence that says why it is not shown.
  async look(rid) {
    if (!rid) return;
    this.rid = rid;
    let body;
    try {
      body = await this.ask(rid);
    } catch (error) {
      body = { sentence: error.message };
    }
    if (this.rid !== rid) return;  // another was asked for meanwhile
    this.rid = body.rid ?? rid;
    this.show(body);
    this.draw();
    $("request").scrollIntoView({ block: "nearest" });
  }

  show(body) {
    const host = $("request");
    host.hidden = false;
    const buttons = [el("button", { type: "button", click: () => this.look(this.rid) }, "Ask again"), el("button", { type: "button", click: () => this.close() }, "Close")];
    if (body.sentence) {
      host.replaceChildren(el("header", {}, el("p", { class: "what" }, `${body.sentence[0].toUpperCase()}${body.sentence.slice(1)}.`), ...buttons));
      return;
    }
    const whole = Math.max(...body.marks.map((mark) => mark.at_s), 0);
    const why = body.why.length ? body.why.flatMap(({ title, sentences }) => [el("h3", {}, title), ...sentences.map((each) => el("p", {}, each))])
      : [el("p", {}, this.fleet.head.requests ? body.no_reasons : `${OLD}, and keeps no reasons.`)];
    host.replaceChildren(el("header", {}, el("h2", {}, body.title), ...buttons),
      el("ol", { class: "steps", "aria-label": `Its steps, from 0 to ${time(whole)}` }, ...body.marks.map((mark) => step(mark, whole))),
      el("div", { class: "why" }, ...why), ...body.notes.map((note) => el("p", { class: "note" }, note)),
      ...(body.others.length ? [el("p", { class: "note" }, "Others that begin so:", ...body.others.flatMap((rid) => [" ", el("button", { type: "button", click: () => this.look(rid) }, rid)]))] : []));
  }

  close() {
    this.rid = null;
    $("request").hidden = true;
    $("request").replaceChildren();
    this.draw();
  }
}

function heading(when) {
  return el("thead", {}, el("tr", {}, ...HEADS.map((head, place) => el("th", { scope: "col", ...(place > 3 ? { class: place === 4 ? "main" : "minor" } : {}) }, head || when))));
}

// A step and its bar, which covers the time that it took.
function step({ at_s: at, took_s: took, part, leg, words, bad }, whole) {
  const bar = el("i", { class: leg || "controller" }), share = (value) => `${(100 * value) / (whole || 1)}%`, long = Math.min(at, Math.max(0, took ?? 0));
  bar.style.marginLeft = `min(${share(at - long)}, calc(100% - 2px))`;
  bar.style.width = share(long);
  return el("li", bad ? { class: "bad" } : {}, el("span", { class: "at" }, time(at)), el("span", { class: "took" }, took === null ? "" : `+${time(took)}`),
    el("span", { class: "part" }, part), el("span", { class: "words" }, `${bad ? "✕ " : ""}${words}`), el("span", { class: "track", "aria-hidden": "true" }, bar));
}

// As `pdbus trace` writes it.
function time(value) {
  if (value < 0.9995) return `${(1e3 * value).toFixed(value < 0.09995 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 9.9995 ? 3 : 1)} s`;
}

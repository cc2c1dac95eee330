"use strict";
// The chat page of an edge: a conversation, which ranks answered, and the ranks' load, asked for each second. What comes
// from a server is set as text.
const $ = (id) => document.getElementById(id);
const LOOK_MS = 1000, PATIENCE_MS = 10000;
const ROLES = ["prefill", "decode", "unified"];
let turns = [], running = null;

// --- asking the server ---

class Refused extends Error {}  // for want of a valid key

/** Return the response if all is well. Raises Error with one sentence to show, or AbortError. */
async function call(path, more) {
  const key = $("key").value.trim();
  if (/[^!-~]/.test(key)) throw refused(key);  // no header can have it
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: "Bearer " + key }) };
  let response;
  try {
    response = await fetch(path, { headers, ...more });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server does not answer.");
  }
  if (response.ok) return response;
  if (response.status === 401) throw refused(key);
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? "The server answers with status " + response.status + ".");
}

function refused(key) {
  $("door").hidden = false;
  return new Refused(key ? "The server does not know this API key." : "The server asks for an API key.");
}

/** Yield the events of a streamed answer. Raises Error where it ends too early. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The connection to the server broke off.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// --- the conversation ---

function show(kind, text) {
  const box = document.createElement("div");
  box.className = kind;
  atEnd(() => { box.textContent = text; $("talk").append(box); });
  return box;
}

/** Change the conversation; a reader at its end stays there, one that has scrolled up is left alone. */
function atEnd(change) {
  const talk = $("talk"), follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
  change();
  if (follows) talk.scrollTop = talk.scrollHeight;
}

function forgive() {
  document.querySelectorAll(".error").forEach((each) => each.remove());
}

async function ask(text) {
  const talk = turns, mine = new AbortController(), began = performance.now();
  const asked = { role: "user", content: text };
  forgive();
  const question = show("turn user", text), box = show("turn", "");
  $("talk").scrollTop = $("talk").scrollHeight;
  $("talk").ariaBusy = "true";
  running = mine;
  $("send").textContent = "Stop";
  let answer = "", first = 0, route = null, usage = null, trouble = null;
  try {
    const stream = { stream: true, stream_options: { include_usage: true } };
    const body = JSON.stringify({ model: $("model").value, messages: [...talk, asked], ...stream });
    for await (const event of events(await call("/v1/chat/completions", { method: "POST", body, signal: mine.signal }))) {
      usage = event.usage ?? usage;
      route = event.choices[0]?.pdbus ?? route;
      const more = event.choices[0]?.delta.content;
      if (!more) continue;
      first ||= performance.now() - began;
      answer += more;
      atEnd(() => { box.textContent = answer; });
    }
  } catch (error) {
    trouble = error;
  }
  if (running === mine) {
    running = null;
    $("send").textContent = "Send";
    $("talk").ariaBusy = "false";
  }
  if (talk !== turns) return;  // a new chat has begun meanwhile
  if (answer) {
    talk.push(asked, { role: "assistant", content: answer });
  } else {
    box.remove();
  }
  if (trouble?.name === "AbortError") {
    show("facts", "stopped");
  } else if (trouble) {
    show("error", trouble.message);
    if (!answer && !$("text").value) {  // to be sent again
      question.remove();
      $("text").value = text;
    }
    if (trouble instanceof Refused) $("key").select();
  }
  if (route) show("facts", story(route, first, performance.now() - began, usage));
}

/** Say which ranks answered, and how fast. */
function story(route, first, total, usage) {
  const facts = [route.prefill ? route.prefill + " → " + route.decode : route.decode];
  const many = usage?.completion_tokens ?? 0;
  const each = many > 1 ? ", then " + ((total - first) / (many - 1)).toFixed(1) + " ms a token" : "";
  if (first) facts.push("first token after " + first.toFixed(0) + " ms" + each);
  if (usage) facts.push(usage.prompt_tokens + " tokens in, " + many + " out");
  return facts.join(" · ");
}

// --- the ranks ---

const rows = new Map();  // by rank
let looks = 0;  // the last of them goes on

/** Show the ranks now and each second from then on, until a key is refused. Return whether it was not. */
async function look() {
  const mine = ++looks;
  try {
    const { ranks } = await (await call("/load", { signal: AbortSignal.timeout(PATIENCE_MS) })).json();
    ranks.sort((one, other) => ROLES.indexOf(one.role) - ROLES.indexOf(other.role));
    choose([...new Set(ranks.map((rank) => rank.model))].sort());
    draw(ranks);
    say(summary(ranks), true);
  } catch (error) {
    draw([]);
    say(error.message, false);
    if (error instanceof Refused) return false;
  }
  setTimeout(() => { if (mine === looks) look(); }, LOOK_MS);
  return true;
}

function say(text, fine) {
  if ($("state").textContent !== text) $("state").textContent = text;  // what is set is read aloud
  $("state").className = fine ? "" : "bad";
}

function summary(ranks) {
  const counts = new Map(ROLES.map((role) => [role, 0]));  // first those that are ready
  for (const { role, state } of ranks) {
    const what = state === "ready" ? role : role + " " + state;
    counts.set(what, (counts.get(what) ?? 0) + 1);
  }
  const said = [...counts].filter(([, count]) => count).map(([what, count]) => count + " " + what).join(", ");
  return said ? "Ranks: " + said : "No rank has joined yet.";
}

function same(one, other) {
  return one.length === other.length && one.every((each, at) => each === other[at]);
}

function choose(models) {
  if (same(models, [...$("model").options].map((option) => option.value))) return;
  const chosen = $("model").value;
  $("model").replaceChildren(...models.map((name) => new Option(name)));
  if (models.includes(chosen)) $("model").value = chosen;
  $("model").hidden = models.length < 2;
}

function draw(ranks) {
  const names = ranks.map((rank) => rank.rank);
  if (!same(names, [...rows.keys()])) {
    const kept = new Map(rows);
    rows.clear();
    for (const name of names) rows.set(name, kept.get(name) ?? row(name));
    $("ranks").replaceChildren(...rows.values());
  }
  for (const rank of ranks) {
    const { kv_tokens: kv, kv_capacity: capacity } = rank, box = rows.get(rank.rank), [, load, bar] = box.childNodes;
    const figures = [rank.state, (rank.running ?? "-") + " running", (rank.waiting ?? "-") + " waiting"];
    const share = capacity ? (100 * kv) / capacity : 0;
    if (capacity) figures.push("KV " + share.toFixed(0) + "%");
    box.className = rank.state === "ready" ? "rank" : "rank away";
    load.textContent = " " + figures.join(", ");
    bar.firstChild.style.width = share + "%";
  }
}

function row(name) {
  const box = document.createElement("div"), title = document.createElement("b"), bar = document.createElement("div");
  title.textContent = name;
  bar.className = "bar";
  bar.append(document.createElement("i"));
  box.append(title, "", bar);
  return box;
}

// --- what a person does ---

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = $("text").value.trim();
  $("text").value = "";
  if (text) ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) $("form").requestSubmit();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("door").addEventListener("submit", async (event) => {
  event.preventDefault();
  forgive();
  if (await look()) $("text").focus(); else $("key").select();
});
$("clear").addEventListener("click", () => {
  running?.abort();
  turns = [];
  $("talk").replaceChildren();
  $("text").focus();
});
$("text").value = new URLSearchParams(location.search).get("q") ?? "";  // a link may fill it in, and a person sends it
look();

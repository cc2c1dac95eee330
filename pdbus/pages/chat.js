"use strict";
const $ = (id) => document.getElementById(id);
let turns = [], running = null;

function head() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
}

function show(kind, text) {
  const box = document.createElement("div");
  box.className = kind;
  box.textContent = text;
  $("talk").append(box);
  $("talk").scrollTop = $("talk").scrollHeight;
  return box;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

async function ask(text) {
  turns.push({ role: "user", content: text });
  show("turn user", text);
  const box = show("turn", "");
  running = new AbortController();
  $("send").textContent = "Stop";
  const began = performance.now();
  let answer = "", first = 0, route = null, usage = null;
  try {
    const model = $("model").value;
    const body = JSON.stringify({ model, messages: turns, stream: true, stream_options: { include_usage: true } });
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: head(), body, signal: running.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      const choice = event.choices[0];
      if (!choice) continue;
      route = choice.pdbus || route;
      if (choice.delta.content) {
        first = first || performance.now() - began;
        answer += choice.delta.content;
        box.textContent = answer;
        $("talk").scrollTop = $("talk").scrollHeight;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") show("facts", "stopped"); else show("turn error", error.message);
  }
  running = null;
  $("send").textContent = "Send";
  if (answer) turns.push({ role: "assistant", content: answer }); else turns.pop();
  if (!route) return;
  const way = route.prefill ? route.prefill + " → " + route.decode : route.decode;
  const total = performance.now() - began, many = usage ? usage.completion_tokens : 0;
  const each = many > 1 ? ", then " + ((total - first) / (many - 1)).toFixed(1) + " ms a token" : "";
  show("facts", way + " · first token after " + first.toFixed(0) + " ms" + each +
    (usage ? " · " + usage.prompt_tokens + " tokens in, " + many + " out" : ""));
}

function choose(models) {
  if (models.join() === [...$("model").options].map((option) => option.value).join()) return;
  $("model").replaceChildren(...models.map((name) => new Option(name)));
  $("model").hidden = models.length < 2;
}

async function look() {
  try {
    const response = await fetch("/load", { headers: head() });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const ranks = (await response.json()).ranks;
    choose([...new Set(ranks.map((rank) => rank.model))].sort());
    $("ranks").replaceChildren(...ranks.map((rank) => {
      const row = document.createElement("div"), name = document.createElement("b"), bar = document.createElement("div");
      const full = document.createElement("i"), share = rank.kv_capacity ? rank.kv_tokens / rank.kv_capacity : 0;
      row.className = rank.state === "ready" ? "rank" : "rank away";
      name.textContent = rank.rank;
      bar.className = "bar";
      full.style.width = 100 * share + "%";
      bar.append(full);
      row.append(name, ` ${rank.state}, ${rank.running ?? "-"} running, ${rank.waiting ?? "-"} waiting`, bar);
      return row;
    }));
  } catch (error) {
    $("ranks").textContent = error.message;
  }
  setTimeout(look, 1000);
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = $("text").value.trim();
  $("text").value = "";
  if (text) ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("form").requestSubmit(); }
});
$("clear").addEventListener("click", () => { turns = []; $("talk").replaceChildren(); });
look();
const question = new URLSearchParams(location.search).get("q");  // a link may ask
if (question) ask(question);

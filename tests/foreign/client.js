// One request from submit to its end, which is printed as a line of JSON:
//   node client.js CONTROLLER --prompt 1,2,3 [--leg pair] [--max-tokens 8] [--cancel-after TOKENS] [--deadline-s S]
"use strict";

const { parseArgs } = require("util");
const { encode, decode, packIds, random63, derive } = require("./messages.js");
const { Connecting } = require("./zmtp.js");

const { values: asked, positionals: [base] } = parseArgs({
  allowPositionals: true,
  options: {
    prompt: { type: "string" }, leg: { type: "string", default: "pair" }, "max-tokens": { type: "string", default: "8" },
    "cancel-after": { type: "string" }, "deadline-s": { type: "string", default: "0" },
    "timeout-s": { type: "string", default: "60" },
  },
});

const prompt = asked.prompt.split(",").map(Number);
const rid = `js-${random63()}`;
const room = asked.leg === "unified" ? null : random63();
const cancelAfter = asked["cancel-after"] === undefined ? Infinity : Number(asked["cancel-after"]);
const ids = [];
let attempt = 0, stream, at, finish = "", cancelled = false, answered = false, silence, lastAttach = 0;

const controller = new Connecting("DEALER", derive(base, "clients", 0), { onMessage: fromController });

function submit(wait) {
  if (answered) return;
  const header = encode(
    "submit", rid, asked.leg, prompt.length, Number(asked["max-tokens"]), room, null, null, "", "", "", 1, 0,
    Number(asked["deadline-s"]));
  controller.send([header, packIds(prompt), encode("params")]);
  setTimeout(submit, wait, Math.min(2 * wait, 4000)).unref();
}

function fromController(frames) {
  const message = frames.length === 1 && decode("clients", frames[0]);
  if (!message || (message.rid !== undefined && message.rid !== rid)) return;
  answered = true;
  if (message.tag === "accepted" && message.attempt >= attempt) follow(message);
  else if (message.tag === "failed") end(message.code, message.message);
  else if (message.tag === "refused") end(message.code, message.message);
}

function follow(accepted) {
  if (!accepted.decode || (accepted.attempt === attempt && at === accepted.decode.endpoint)) return;
  stream?.close();
  ({ attempt } = accepted);
  at = accepted.decode.endpoint;
  stream = new Connecting("DEALER", at, { onReady: attach, onMessage: fromRank });
}

function attach() {
  lastAttach = Date.now();
  stream.send([encode("attach", rid, attempt, ids.length, false, room)]);
  watch();
}

function watch() { // an attach again when the stream has been silent for 3 s, and no more after 3 s more
  clearTimeout(silence);
  silence = setTimeout(() => {
    attach();
    clearTimeout(silence);
    silence = setTimeout(() => end("peer_lost", "the stream is silent"), 3000);
  }, 3000);
}

function fromRank(frames) {
  const message = frames.length === 1 && decode("data_out", frames[0]);
  if (!message || message.tag !== "tokens" || message.rid !== rid || message.attempt !== attempt || finish) return;
  watch();
  if (message.logprobs.length) return; // none were asked for
  if (message.start > ids.length) {
    if (Date.now() - lastAttach > 250) attach();
    return;
  }
  ids.push(...message.ids.slice(ids.length - message.start));
  if (message.finish === "stop" || message.finish === "length") {
    finish = message.finish;
    stream.send([encode("detach", rid, attempt)]);
    end("ok", "");
  } else if (ids.length >= cancelAfter && !cancelled) {
    cancelled = true;
    controller.send([encode("cancel", rid)]);
  }
}

function end(code, message) {
  process.stdout.write(`${JSON.stringify({ code, message, finish, ids, attempt })}\n`);
  controller.close();
  stream?.close();
  clearTimeout(silence);
  clearTimeout(patience);
}

const patience = setTimeout(() => {
  process.stderr.write("nothing ended the request in time\n");
  process.exit(1);
}, 1000 * Number(asked["timeout-s"]));
submit(1000);

// A unified rank whose engine counts: token i of an output is (sum of the prompt + i) % 1000. It says what happens as lines.
//   node rank.js --bus BASE --controller BASE --data ENDPOINT [--instance NAME] [--token-ms MS]
"use strict";

const { parseArgs } = require("util");
const { encode, decode, unpackIds, random63, derive } = require("./messages.js");
const { Connecting, router } = require("./zmtp.js");

const { values: asked } = parseArgs({
  options: {
    bus: { type: "string" }, controller: { type: "string" }, data: { type: "string" },
    instance: { type: "string", default: "js-0" }, "token-ms": { type: "string", default: "2" },
  },
});
const INSTANCE = asked.instance, MODEL = "counts";
const REPORT_MS = 250, MEMBER_S = 1, KEPT_MS = 30000, UNREAD_MS = 10000, EARLY_MS = 5000, SIGN_MS = 1000, LEAVE_MS = 2000;
const MAX_CONTEXT = 4096, KV_CAPACITY = 65536, MAX_RUNNING = 64, BLOCK_TOKENS = 16;
const EPOCH = random63(), STARTED_US = Date.now() * 1000, WHO = [INSTANCE, 0, EPOCH];

const legs = new Map(); // rid: the leg that was dispatched last, until 30 s after its end
const early = new Map(); // connection: attaches that came before their dispatch, by rid
const cancelledEarly = new Map(); // rid: the cancel_leg of what has not come
const heard = new Map(); // controller epoch: what it sent
const seqs = { load: 0, rooms: 0, member: 0 };
let state = "starting", endpoint, brokerEpoch, loadSeq = 0, steps = 0, outputs = 0, ingested = 0;
let follow = false, welcomed = false, onBus = false, leaseMs = 3000, heardAt = Date.now(), helloAt = 0, left = false;

const say = (event, detail = "") => process.stdout.write(`${event} ${detail}`.trim() + "\n");
const running = () => [...legs.values()].filter((leg) => !leg.over);

// ---- the bus

function load() {
  const live = running(), tokens = live.reduce((sum, leg) => sum + leg.promptTokens + leg.ids.length, 0);
  const acks = [...heard.values()].slice(-64).map((from) => [from.epoch, from.dispatches, from.tokens]);
  return [
    ++loadSeq, steps, live.length, 0, 0, tokens, KV_CAPACITY, MAX_RUNNING, acks, ingested, 0, 0, outputs, ingested, ingested,
  ];
}

function member() {
  bus.send([Buffer.from(`member/${INSTANCE}/0/`), encode(
    "member", ...WHO, ++seqs.member, load(), "unified", MODEL, 1, state, endpoint, follow, seqs.rooms, MEMBER_S)]);
}

function report() {
  bus.send([Buffer.from(`load/${INSTANCE}/0/`), encode("load", ...WHO, ++seqs.load, load())]);
  if (seqs.load % 2 === 0 || !onBus) member();
}

function snapshot() { // a unified rank has no rooms
  bus.send([Buffer.from(`rooms/${INSTANCE}/0/`), encode("rooms", ...WHO, ++seqs.rooms, null, endpoint, [], [], true)]);
}

function fromBus(frames) {
  const message = frames.length === 2 && decode("bus", frames[1]);
  if (!message) return;
  const topics = { beacon: "beacon/", resync: `to/${INSTANCE}/0/`, member: `member/${INSTANCE}/0/` };
  if (frames[0].toString() !== topics[message.tag]) return;
  const mine = message.epoch == EPOCH;
  if (message.tag === "member" && mine && !onBus) {
    onBus = true;
    ready();
  } else if (message.tag === "resync" && mine) {
    member();
    snapshot();
  } else if (message.tag === "beacon" && message.epoch != brokerEpoch) {
    brokerEpoch = message.epoch;
    member();
  }
}

// ---- the controller

function hello(why) {
  helloAt = Date.now();
  say("hello", why);
  controller.send([encode(
    "hello", ...WHO, "unified", MODEL, 1, state, endpoint, MAX_CONTEXT, KV_CAPACITY, MAX_RUNNING, BLOCK_TOKENS,
    running().map((leg) => [leg.rid, leg.attempt]), STARTED_US)]);
}

function ready() {
  if (!welcomed || !onBus || state !== "starting") return;
  state = "ready";
  hello("ready");
  member();
  say("READY", endpoint);
}

function progress(started, ended) {
  controller.send([encode("progress", ...WHO, started, ended)]);
}

const ended = (of, code, message = "", tokens = 0) => [of.rid, of.attempt, "unified", code, message, tokens];

function fromController(frames) {
  const message = decode("nodes", frames[0]);
  if (!message || (message.tag !== "dispatch" && frames.length !== 1)) return;
  heardAt = Date.now();
  const act = {
    who: () => hello("who"),
    ping: () => controller.send([encode("pong", message.n, steps, running().length > 0, loadSeq)]),
    welcome: () => welcome(message),
    dispatch: () => dispatch(message, frames),
    cancel_leg: () => cancel(message),
    drain: () => drain(),
    recall: () => controller.send([encode("recalled", message.id)]),
    refused: () => message.code === "fenced" && fenced(),
  };
  act[message.tag]();
}

function from(epoch) {
  const known = heard.get(String(epoch)) ?? { epoch, dispatches: 0, tokens: 0, number: 0 };
  return heard.set(String(epoch), known).get(String(epoch));
}

function welcome(message) {
  say("welcome");
  from(message.epoch);
  leaseMs = 1000 * message.lease_s;
  follow = message.follow_bootstrap_room;
  welcomed = true;
  ready();
  const last = [...legs.values()].filter((leg) => leg.over).map((leg) => leg.over);
  if (last.length) progress([], last); // again, for what a lost connection took with it
}

function dispatch(message, frames) {
  const sender = from(message.controller_epoch);
  if (message.number <= sender.number) return;
  sender.number = message.number;
  sender.dispatches += 1;
  sender.tokens += Number(message.charge);
  const known = legs.get(message.rid), refuse = (code, why) => progress([], [ended(message, code, why)]);
  const params = frames.length === 3 && decode("params", frames[2]);
  if (!params || message.leg !== "unified" || frames[1].length !== 4 * message.prompt_tokens) {
    return refuse("bad_message", "the frames are not those of a unified leg");
  }
  if (known && differs(known, message)) {
    if (known.reader || known.client !== message.client) return refuse("duplicate_rid", "another request has this rid");
    if (!known.over) finish(known, "failed", "fenced");
    legs.delete(message.rid);
  } else if (known && message.attempt === known.attempt) {
    return progress(known.ids.length ? [[known.rid, known.attempt]] : [], known.over ? [known.over] : []);
  } else if (known && message.attempt < known.attempt) return refuse("fenced");
  const early = cancelledEarly.get(message.rid);
  if (early && early.attempt >= message.attempt) return refuse(early.code);
  if (state === "draining") return refuse("draining");
  if (message.prompt_tokens + message.max_tokens > MAX_CONTEXT) return refuse("too_long");
  if (running().length >= MAX_RUNNING) return refuse("overloaded");
  if (known && !known.over) finish(known, "failed", "fenced");
  begin(message, unpackIds(frames[1]), params);
}

function differs(leg, other) { // M85
  const rooms = leg.room !== null && other.bootstrap_room !== null && leg.room != other.bootstrap_room;
  return rooms || leg.prompt !== other.prompt_tokens - other.offset || leg.client !== other.client;
}

function cancel(message) {
  const leg = legs.get(message.rid);
  if (!leg || leg.attempt < message.attempt) cancelledEarly.set(message.rid, message);
  setTimeout(() => cancelledEarly.delete(message.rid), KEPT_MS).unref();
  if (!leg || leg.attempt > message.attempt) return progress([], [ended(message, message.code)]);
  if (message.room !== null && leg.room !== null && message.room != leg.room) return;
  if (leg.over) progress([], [leg.over]);
  else if (!message.if_unfetched) finish(leg, "cancelled", message.code);
}

// ---- legs and their streams

function begin(message, prompt, params) {
  const { rid, attempt, offset, client } = message;
  const leg = {
    rid, attempt, offset, client, room: message.bootstrap_room, prompt: message.prompt_tokens - offset,
    promptTokens: message.prompt_tokens, ids: [], sent: offset, reader: null, over: null, end: null,
  };
  const sum = prompt.slice(0, leg.prompt).reduce((total, id) => total + id, 0);
  ingested += prompt.length;
  legs.set(rid, leg);
  leg.engine = setInterval(() => {
    const id = (sum + offset + leg.ids.length) % 1000;
    leg.ids.push(id);
    steps += 1;
    outputs += 1;
    if (leg.ids.length === 1) progress([[rid, attempt]], []);
    if (params.stop_token_ids.includes(id)) finish(leg, "stop", "ok");
    else if (leg.ids.length >= message.max_tokens) finish(leg, "length", "ok");
    else deliver(leg);
  }, Number(asked["token-ms"]));
  if (message.deadline_s) leg.deadline = setTimeout(() => finish(leg, "failed", "deadline"), 1000 * message.deadline_s);
  if (!message.continue_on_disconnect) unread(leg);
  for (const [connection, waiting] of early) {
    if (!waiting.has(rid)) continue;
    const attach = waiting.get(rid);
    waiting.delete(rid);
    read(attach, connection);
  }
}

function unread(leg) {
  clearTimeout(leg.unread);
  leg.unread = setTimeout(() => !leg.reader && !leg.over && finish(leg, "cancelled", "cancelled"), UNREAD_MS);
}

function finish(leg, why, code) {
  clearInterval(leg.engine);
  clearTimeout(leg.deadline);
  clearTimeout(leg.unread);
  leg.end = [why, code];
  leg.over = ended(leg, code, "", leg.ids.length);
  deliver(leg);
  progress([], [leg.over]);
  say("ended", code);
  setTimeout(() => legs.get(leg.rid) === leg && legs.delete(leg.rid), KEPT_MS).unref();
  if (state === "draining") leaveWhenIdle();
}

function deliver(leg, sign = false) {
  const ids = leg.ids.slice(leg.sent - leg.offset);
  if (!leg.reader || (!ids.length && !leg.end && !sign)) return;
  leg.reader.send([encode("tokens", leg.rid, leg.attempt, leg.sent, ids, ...(leg.end ?? []))]);
  leg.sent += ids.length;
  leg.said = Date.now();
}

const nothing = (connection, attach, code) =>
  connection.send([encode("tokens", attach.rid, attach.attempt, attach.have, [], "failed", code)]);

function read(attach, connection) {
  const leg = legs.get(attach.rid);
  const other = leg && attach.room !== null && leg.room !== null && attach.room != leg.room;
  if (!leg || other || leg.attempt < attach.attempt) return wait(attach, connection);
  if (leg.client) return nothing(connection, attach, "bad_identity"); // without keys nobody is that client
  if (leg.attempt > attach.attempt) return nothing(connection, attach, "fenced");
  leg.reader = connection;
  leg.sent = Math.max(leg.offset, Math.min(Number(attach.have), leg.offset + leg.ids.length));
  deliver(leg, true);
}

function wait(attach, connection) {
  if (!early.has(connection)) early.set(connection, new Map());
  const waiting = early.get(connection);
  if (waiting.size >= 1024) return;
  waiting.set(attach.rid, attach);
  setTimeout(() => {
    if (waiting.get(attach.rid) === attach && waiting.delete(attach.rid)) nothing(connection, attach, "peer_lost");
  }, EARLY_MS).unref();
}

function fromReader(frames, connection) {
  const message = frames.length === 1 && decode("data_in", frames[0]);
  if (!message) return;
  if (message.tag === "attach") return read(message, connection);
  const leg = legs.get(message.rid);
  if (leg?.attempt === message.attempt && leg.reader === connection) loseReader(leg);
}

function loseReader(leg) {
  leg.reader = null;
  if (!leg.over) unread(leg);
}

function readerGone(connection) {
  early.delete(connection);
  for (const leg of legs.values()) if (leg.reader === connection) loseReader(leg);
}

// ---- the end

function drain() {
  if (state === "draining") return;
  state = "draining";
  say("draining");
  hello("draining");
  member();
  leaveWhenIdle();
}

function leaveWhenIdle() {
  if (!left && !running().length) leave();
}

function fenced() {
  for (const leg of running()) finish(leg, "failed", "shutting_down");
  if (!left) leave();
}

function leave() {
  left = true;
  state = "gone";
  member();
  controller.send([encode("bye", ...WHO)]);
  say("bye");
  for (const timer of timers) clearInterval(timer);
  for (const socket of [bus, news, controller, data]) socket.close(); // what was sent still goes out
  setTimeout(() => process.exit(0), LEAVE_MS).unref();
}

function look() { // M84, and the signs of life on streams
  const now = Date.now();
  if (controller.connection.open && now - heardAt > leaseMs / 2 && now - helloAt >= 1000) hello("silence");
  for (const leg of running()) if (now - (leg.said ?? 0) > SIGN_MS) deliver(leg, true);
}

let data, bus, news, controller;
const timers = [];

async function main() {
  data = await router(asked.data, { onMessage: fromReader, onClose: readerGone });
  ({ endpoint } = data);
  bus = new Connecting("PUB", derive(asked.bus, "pub", 0), {});
  news = new Connecting("SUB", derive(asked.bus, "sub", 1), {
    topics: ["beacon/", `to/${INSTANCE}/0/`, `member/${INSTANCE}/0/`], onMessage: fromBus,
  });
  controller = new Connecting("DEALER", derive(asked.controller, "nodes", 1), {
    onReady: () => hello("connected"), onMessage: fromController,
  });
  timers.push(setInterval(report, REPORT_MS), setInterval(look, 100));
  process.on("SIGTERM", drain);
}

main();

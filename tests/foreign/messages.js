// The messages of docs/protocol.md that a client and a unified rank read, with the bounds and defaults of its tables.
"use strict";

const crypto = require("crypto");
const msgpack = require("./msgpack.js");

const CODES = new Set(
  ("ok bad_request bad_room duplicate_room duplicate_rid empty_prompt too_long bad_rank rank_unavailable no_rank " +
    "overloaded deadline cancelled peer_lost unknown_room kv_failed prefill_failed decode_failed engine_failed poison " +
    "fenced draining shutting_down bad_version bad_message too_many bad_identity").split(" "));
const TWO_63 = 2n ** 63n;

function must(holds) {
  if (!holds) throw new Error("a field is missing, of another type or out of bounds");
}

function check(holds) {
  return (value) => {
    must(holds(value));
    return value;
  };
}

const isInt = (value) => Number.isSafeInteger(value) || typeof value === "bigint";
const int = (low, high) => check((value) => isInt(value) && value >= low && value < high);
const float = (low, high) => check((value) => (isInt(value) || Number.isFinite(value)) && value >= low && value <= high);
const str = (least, most) => check((v) => typeof v === "string" && [...v].length >= least && [...v].length <= most);
const word = (pattern) => check((value) => typeof value === "string" && pattern.test(value));
const maybe = (read) => (value) => (value === null ? null : read(value));
const any = (value) => value;

function list(read, most) {
  return (value) => {
    must(Array.isArray(value) && value.length <= most);
    return value.map(read);
  };
}

// Fields in order, each [how it is read] or [how, default]; elements after the last are ignored, absent ones filled in.
function struct(fields) {
  return (value) => {
    must(Array.isArray(value));
    return Object.fromEntries(Object.entries(fields).map(([name, [read, ...standard]], i) => {
      must(i < value.length || standard.length);
      return [name, i < value.length ? read(value[i]) : standard[0]];
    }));
  };
}

const bool = check((value) => typeof value === "boolean");
const code = check((value) => CODES.has(value));
const name = word(/^[A-Za-z0-9._-]{1,64}$/);
const count = int(0, TWO_63), epoch = int(1, TWO_63), room = int(0, TWO_63), attempt = int(1, 1000001);
const dpRank = int(0, 4096), token = int(0, 2 ** 31), role = word(/^(prefill|decode|unified)$/), rid = str(1, 128);
const endpoint = word(/^[!-~]{0,150}$/), sentence = str(0, 1024), key = str(0, 80), seconds = float(0, 1e9);
const location = struct({ instance: [name], dp_rank: [dpRank], epoch: [epoch], endpoint: [endpoint] });
const trace = struct({ traceparent: [word(/^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$/)], tracestate: [str(0, 512), ""] });
const more = struct({ rid: [rid], attempt: [attempt], start: [count], ids: [list(token, 16384)] });
const refused = struct({ code: [code], message: [sentence], id: [count, 0] });

const READ = {
  bus: {
    beacon: struct({ epoch: [epoch], seq: [count], interval_s: [seconds] }),
    resync: struct({ instance: [name], dp_rank: [dpRank], epoch: [epoch] }),
    member: struct({ instance: [name], dp_rank: [dpRank], epoch: [epoch] }),
  },
  nodes: {
    welcome: struct({
      controller: [name], epoch: [epoch], follow_bootstrap_room: [bool], lease_s: [seconds], dp_rank: [dpRank],
    }),
    who: struct({}),
    ping: struct({ n: [count] }),
    dispatch: struct({
      rid: [rid], attempt: [attempt], leg: [role], dp_rank: [dpRank], controller_epoch: [epoch], number: [count],
      charge: [count], prompt_tokens: [count], max_tokens: [count], offset: [count, 0], bootstrap_room: [maybe(room), null],
      prefill: [maybe(location), null], prefill_instance: [str(0, 64), ""], disagg_prefill_dp_rank: [maybe(dpRank), null],
      deadline_s: [seconds, 0], priority: [int(-1000, 1001), 0], client: [key, ""], continue_on_disconnect: [bool, false],
      trace: [maybe(trace), null],
    }),
    cancel_leg: struct({
      rid: [rid], attempt: [attempt], code: [code, "cancelled"], if_unfetched: [bool, false], client: [key, ""],
      room: [maybe(room), null],
    }),
    drain: struct({ dp_rank: [dpRank] }),
    recall: struct({ id: [count], rid: [rid] }),
    refused,
  },
  clients: {
    accepted: struct({
      rid: [rid], attempt: [attempt], bootstrap_room: [maybe(room)], prefill: [maybe(location)], decode: [maybe(location)],
    }),
    failed: struct({
      rid: [str(0, 128)], attempt: [count], code: [code], message: [sentence], retryable: [bool], retry_after_s: [seconds, 0],
    }),
    done: struct({ rid: [rid], attempt: [attempt], legs: [list(any, 2)] }),
    refused,
  },
  data_in: {
    attach: struct({ rid: [rid], attempt: [attempt], have: [count, 0], several: [bool, false], room: [maybe(room), null] }),
    detach: struct({ rid: [rid], attempt: [attempt] }),
  },
  data_out: {
    tokens: struct({
      rid: [rid], attempt: [attempt], start: [count], ids: [list(token, 16384)],
      finish: [word(/^(|stop|length|cancelled|failed)$/), ""], code: [code, "ok"], message: [sentence, ""],
      found_by: [word(/^(|told|computed|asked|local)$/), ""], cached_tokens: [count, 0], logprobs: [list(any, 2048), []],
      others: [list(more, 63), []],
    }),
    refused,
  },
  params: {
    params: struct({
      temperature: [float(0, 100), 0], top_k: [int(0, 2 ** 31 + 1), 0], top_p: [float(0, 1), 1], seed: [count, 0],
      stop_token_ids: [list(token, 64), []], ignore_eos: [bool, false],
    }),
  },
};

function encode(tag, ...fields) {
  return Buffer.concat([Buffer.from([1]), msgpack.encode([tag, ...fields])]);
}

// The message of a frame that came over a socket of this kind, with its tag; undefined, and a line, of a broken one.
function decode(socket, frame) {
  try {
    if (frame.length < 3 || frame.length > 2 ** 20 || frame[0] !== 1) throw new Error("it has another size or version");
    const array = msgpack.decode(frame.subarray(1));
    if (!Array.isArray(array) || typeof array[0] !== "string") throw new Error("it does not begin with a tag");
    if (!Object.hasOwn(READ[socket], array[0])) throw new Error(`it has a tag of another socket: ${array[0].slice(0, 32)}`);
    return { tag: array[0], ...READ[socket][array[0]](array.slice(1)) };
  } catch (error) {
    process.stderr.write(`a message is dropped: ${error.message}\n`);
    return undefined;
  }
}

function packIds(ids) {
  const bytes = Buffer.alloc(4 * ids.length);
  ids.forEach((id, i) => bytes.writeInt32LE(id, 4 * i));
  return bytes;
}

const unpackIds = (bytes) => Array.from({ length: bytes.length / 4 }, (_, i) => bytes.readInt32LE(4 * i));
const random63 = () => crypto.randomBytes(8).readBigUInt64BE() >> 1n || 1n;

// An endpoint of a base address: the name of its ipc socket, how far its tcp port is from the first.
function derive(base, name, offset) {
  if (base.startsWith("ipc://")) return `${base}.${name}`;
  return base.replace(/\d+$/, (port) => Number(port) + offset);
}

module.exports = { encode, decode, packIds, unpackIds, random63, derive };

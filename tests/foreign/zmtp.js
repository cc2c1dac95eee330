// ZMTP 3.1 with the NULL mechanism over tcp and ipc: DEALER, PUB and SUB that connect, a ROUTER that binds.
"use strict";

const net = require("net");

const MORE = 1, LONG = 2, COMMAND = 4;
const MAX_FRAME = 16 * 2 ** 20, MAX_FRAMES = 64;
const HANDSHAKE_MS = 5000, HEARTBEAT_MS = 1000, SILENCE_MS = 3000, AGAIN_MS = 100;

const GREETING = Buffer.alloc(64);
GREETING.set([0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1]);
GREETING.write("NULL", 12);

function frame(flags, body) {
  if (body.length < 256) return Buffer.concat([Buffer.from([flags, body.length]), body]);
  const head = Buffer.alloc(9);
  head[0] = flags | LONG;
  head.writeBigUInt64BE(BigInt(body.length), 1);
  return Buffer.concat([head, body]);
}

function command(name, data) {
  return frame(COMMAND, Buffer.concat([Buffer.from([name.length]), Buffer.from(name), data]));
}

function ready(type) {
  const size = Buffer.alloc(4);
  size.writeUInt32BE(type.length);
  return command("READY", Buffer.concat([Buffer.from("\x0bSocket-Type"), size, Buffer.from(type)]));
}

// One connection: `onReady(connection)` after the handshake, `onMessage(frames, connection)`, `onClose()`.
class Connection {
  constructor(stream, type, { onReady, onMessage, onClose }) {
    Object.assign(this, { stream, onReady, onMessage });
    this.bytes = Buffer.alloc(0);
    this.frames = [];
    this.greeted = this.open = false;
    this.topics = new Map(); // what a peer that subscribes wants, with how often it said so
    this.heard = Date.now();
    stream.on("data", (bytes) => this.take(bytes));
    stream.on("error", () => stream.destroy());
    stream.on("close", () => {
      clearTimeout(this.patience);
      this.open = false;
      onClose?.(this);
    });
    this.patience = setTimeout(() => stream.destroy(), HANDSHAKE_MS);
    stream.write(GREETING);
    stream.write(ready(type));
  }

  send(frames) {
    this.stream.write(Buffer.concat(frames.map((body, i) => frame(i < frames.length - 1 ? MORE : 0, body))));
  }

  wants(topic) {
    return [...this.topics.keys()].some((prefix) => topic.startsWith(prefix));
  }

  take(bytes) {
    this.heard = Date.now();
    this.bytes = Buffer.concat([this.bytes, bytes]);
    try {
      if (!this.greeted) this.greet();
      while (this.greeted && !this.stream.destroyed && this.next());
    } catch (error) {
      process.stderr.write(`a connection is closed: ${error.message}\n`);
      this.stream.destroy();
    }
  }

  greet() {
    if (this.bytes.length < 64) return;
    const said = this.bytes.subarray(0, 64);
    if (said[0] !== 0xff || said[9] !== 0x7f || said[10] < 3 || said.toString("latin1", 12, 17) !== "NULL\0") {
      throw new Error("its peer does not speak ZMTP 3 with NULL");
    }
    this.bytes = this.bytes.subarray(64);
    this.greeted = true;
  }

  next() { // whether a whole frame had come
    const flags = this.bytes[0], long = flags & LONG, start = long ? 9 : 2;
    if (this.bytes.length < start) return false;
    const size = long ? Number(this.bytes.readBigUInt64BE(1)) : this.bytes[1];
    if (flags & ~(MORE | LONG | COMMAND) || size > MAX_FRAME) throw new Error("a frame is broken or too long");
    if (this.bytes.length < start + size) return false;
    const body = Buffer.from(this.bytes.subarray(start, start + size));
    this.bytes = this.bytes.subarray(start + size);
    if (flags & COMMAND) this.obey(body);
    else this.collect(body, flags & MORE);
    return true;
  }

  collect(body, more) {
    if (!this.open || this.frames.length >= MAX_FRAMES) throw new Error("a message out of turn or too long");
    this.frames.push(body);
    if (more) return;
    const frames = this.frames;
    this.frames = [];
    this.onMessage?.(frames, this);
  }

  obey(body) {
    const name = body.toString("latin1", 1, 1 + body[0]), data = body.subarray(1 + body[0]);
    if (name === "READY" && !this.open) {
      this.open = true;
      clearTimeout(this.patience);
      this.onReady?.(this);
    } else if (name === "PING") this.stream.write(command("PONG", data.subarray(2, 18)));
    else if (name === "SUBSCRIBE") this.topics.set(data.toString(), (this.topics.get(data.toString()) ?? 0) + 1);
    else if (name === "CANCEL") this.unsubscribe(data.toString());
    else if (name === "ERROR") throw new Error(`its peer says ${data.subarray(1)}`);
  }

  unsubscribe(topic) {
    const left = (this.topics.get(topic) ?? 0) - 1;
    if (left > 0) this.topics.set(topic, left);
    else this.topics.delete(topic);
  }

  beat() { // libzmq's TTL is in tenths of a second
    if (Date.now() - this.heard > SILENCE_MS) this.stream.destroy();
    else this.stream.write(command("PING", Buffer.from([0, SILENCE_MS / 100])));
  }
}

function address(endpoint) {
  if (endpoint.startsWith("ipc://")) return { path: endpoint.slice(6) };
  const [, host, port] = /^tcp:\/\/\[?(.*?)\]?:(\d+)$/.exec(endpoint);
  return { host, port: Number(port) };
}

// A socket that connects, and does so again whenever its connection is gone.
class Connecting {
  constructor(type, endpoint, { topics = [], onReady, onMessage }) {
    Object.assign(this, { type, endpoint, topics, onReady, onMessage });
    this.waiting = [];
    this.connect();
  }

  connect() {
    const stream = net.connect({ ...address(this.endpoint), noDelay: true });
    this.connection = new Connection(stream, this.type, {
      onReady: (connection) => {
        for (const topic of this.topics) stream.write(command("SUBSCRIBE", Buffer.from(topic)));
        if (this.endpoint.startsWith("tcp://")) this.beats = setInterval(() => connection.beat(), HEARTBEAT_MS);
        this.onReady?.(connection);
        for (const frames of this.waiting.splice(0)) connection.send(frames);
      },
      onMessage: this.onMessage,
      onClose: () => {
        clearInterval(this.beats);
        if (!this.closed) this.again = setTimeout(() => this.connect(), AGAIN_MS);
      },
    });
  }

  send(frames) {
    if (this.type === "PUB") {
      if (this.connection.open && this.connection.wants(frames[0].toString())) this.connection.send(frames);
    } else if (this.connection.open) this.connection.send(frames);
    else if (this.waiting.length < 10000) this.waiting.push(frames);
  }

  close() {
    this.closed = true;
    clearTimeout(this.again);
    if (this.connection.open) this.connection.stream.end();
    else this.connection.stream.destroy();
  }
}

// A ROUTER: answers go to the connection that a message came over. The promise is of the endpoint and `close`.
function router(endpoint, { onMessage, onClose }) {
  const live = new Set();
  const server = net.createServer({ noDelay: true }, (stream) => {
    const gone = (connection) => live.delete(connection) && onClose?.(connection);
    live.add(new Connection(stream, "ROUTER", { onMessage, onClose: gone }));
  });
  const close = () => {
    server.close();
    for (const connection of live) connection.stream.end();
  };
  return new Promise((resolve, reject) => {
    server.once("error", reject);
    server.listen(address(endpoint), () => {
      const port = server.address().port;
      resolve({ endpoint: port ? endpoint.replace(/:\d+$/, `:${port}`) : endpoint, close });
    });
  });
}

module.exports = { Connecting, router };

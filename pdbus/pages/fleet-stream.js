// The stream of a fleet's messages, shared by the pages of one browser: one of those that are seen reads it and passes
// it on to the others. A hidden page lets go. Where a browser has no locks (plain HTTP of another machine), each page
// reads for itself.

const SILENT_MS = 10_000;
const AGAIN_MS = [500, 1000, 2000, 5000];

// Have `onMessage(name, body)` called for each message, and `onTrouble(sentence, status)` when there are none: `status`
// is the HTTP status, 0 without an answer. Returns a function that ends it.
export function watch(path, key, onMessage, onTrouble) {
  const shared = "locks" in navigator && "BroadcastChannel" in window;
  const name = `pdbus-fleet:${path}:${key}`;
  let channel = null, ending = null, reading = null, over = false;

  function deliver(message) {
    if (message.trouble) onTrouble(message.trouble, message.status);
    else onMessage(message.name, JSON.parse(message.data));
  }

  function pass(message) {
    channel?.postMessage(message);
    deliver(message);
  }

  async function readOnce(signal) {
    reading = new AbortController();
    const stop = AbortSignal.any([signal, reading.signal]);
    const response = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {}, signal: stop, cache: "no-store" });
    if (!response.ok) {
      const error = new Error((await response.json()).error.message);
      error.status = response.status;
      throw error;
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let parts = [], timer;
    try {
      for (;;) {
        timer = setTimeout(() => reading.abort(new Error("the page server is silent")), SILENT_MS);
        const { value, done } = await reader.read();
        clearTimeout(timer);
        if (done) throw new Error("the page server has ended the stream");
        if (!value.includes("\n\n")) {
          parts.push(value);
          continue;
        }
        const events = (parts.join("") + value).split("\n\n");
        parts = [events.pop()];
        for (const event of events) {
          const [first, second] = event.split("\n", 2);
          pass({ name: first.slice("event: ".length), data: second.slice("data: ".length) });
        }
      }
    } finally {
      clearTimeout(timer);
    }
  }

  async function read(signal) {
    let failures = 0;
    while (!signal.aborted) {
      const began = performance.now();
      try {
        await readOnce(signal);
      } catch (error) {
        if (signal.aborted) return;
        if (error === JOINED) continue;
        failures = performance.now() - began > 10_000 ? 0 : failures + 1;
        pass({ trouble: error.status ? error.message : "the page server does not answer", status: error.status ?? 0 });
        if (error.status === 401 || error.status === 404) return;
        await new Promise((again) => setTimeout(again, AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)]));
      }
    }
  }

  function start() {
    if (ending || over) return;
    const now = ending = new AbortController();
    if (!shared) {
      read(now.signal);
      return;
    }
    let leads = false;
    channel = new BroadcastChannel(name);
    channel.onmessage = ({ data }) => {
      if (data.joined) { if (leads) reading?.abort(JOINED); }  // who joins needs a snapshot, which begins each stream
      else if (!now.signal.aborted) deliver(data);
    };
    channel.postMessage({ joined: true });
    navigator.locks.request(name, { signal: now.signal }, () => { leads = true; return read(now.signal); }).catch(() => {});
  }

  function stop() {
    ending?.abort();
    channel?.close();
    ending = channel = null;
  }

  const look = () => (document.hidden ? stop() : start());
  document.addEventListener("visibilitychange", look);
  window.addEventListener("pagehide", stop);
  window.addEventListener("pageshow", look);
  look();
  return () => { over = true; stop(); };
}

const JOINED = new Error("another page joined");

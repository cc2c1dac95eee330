// A fleet as the messages have told it, and figures as text. Draws nothing.

const NEWS = 1000, SPAN_S = 900;

export const DEAD = new Set(["silent", "lost", "hung"]);

// Of each condition the words at a rank.
export const CONDITIONS = { slow: "slow", full: "full", link: "slow link", cold: "cold cache" };

export class Fleet {
  constructor() { this.clear(); }

  clear() {
    this.seq = -1; this.wall = 0; this.head = { silent: "waiting for the first figures" };
    this.ranks = new Map(); this.rows = []; this.news = []; this.requests = {}; this.version = "";
  }

  // Take in a message; false: it is of before the snapshot.
  apply(name, body) {
    if (name === "snapshot") {
      this.clear();
      this.names = body.names;
      this.version = body.version;
    } else if (body.seq <= this.seq || !this.names) return false;
    this.seq = body.seq; this.wall = body.wall; this.head = body.head;
    for (const id of body.gone ?? []) this.ranks.delete(id);
    for (const kind of ["facts", "figures", "rates"]) {
      const names = this.names[kind];
      for (const row of body[kind] ?? []) {
        let rank = this.ranks.get(row[0]);
        if (!rank) this.ranks.set(row[0], rank = { id: row[0] });
        for (let place = 1; place < names.length; place++) rank[names[place]] = row[place];
        if (kind === "facts") rank.name = `${rank.instance}/${rank.dp_rank}`;
      }
    }
    for (const [list, rows] of Object.entries(body.requests ?? {}))
      this.requests[list] = rows.map((row) => Object.fromEntries(this.names.request.map((name, place) => [name, row[place]])));
    this.rows.push(...(body.rows ?? []));
    while (this.rows.length && this.rows[0][0] < this.wall - SPAN_S) this.rows.shift();
    this.news.push(...(body.news ?? []));
    this.news.splice(0, this.news.length - NEWS);
    return true;
  }

  column(name) { const place = this.names.row.indexOf(name); return this.rows.map((row) => row[place]); }
  now(name) { return this.rows.length ? this.rows.at(-1)[this.names.row.indexOf(name)] : null; }

  // The medians of a rank's role and model: seconds a step and a fetch of a KV cache, and the share of hits; null: not known.
  medians(rank) {
    const [, , step = null, fetch = null, hits = null] = (this.head.medians ?? []).find(([role, model]) => role === rank.role && model === rank.model) ?? [];
    return { step, fetch, hits };
  }

  of(role) {
    return [...this.ranks.values()].filter((rank) => rank.role === role).sort(byName);
  }
}

// Numbers in names count as numbers.
const names = new Intl.Collator("en", { numeric: true });
export const byName = (a, b) => names.compare(a.instance, b.instance) || a.dp_rank - b.dp_rank;

// Figures of a rank that can be chosen: what they are called, how they read, and what is all of it (null: the most there is).
export const CHOICES = {
  "busy or taken": { of: (rank) => (rank.role === "prefill" ? rank.busy ?? rank.taken : rank.taken), show: share, all: () => 1 },
  "taken": { of: (rank) => rank.taken, show: share, all: () => 1 },
  "estimated requests": { of: (rank) => rank.estimate_requests, show: number, all: (rank) => rank.max_running || null },
  "KV memory in use": { of: (rank) => kvShare(rank), show: share, all: () => 1 },
  "step time": { of: (rank) => rank.step_s, show: seconds, all: () => null },
  "running": { of: (rank) => rank.running, show: number, all: (rank) => rank.max_running || null },
  "waiting": { of: (rank) => rank.waiting, show: number, all: () => null },
  "busy": { of: (rank) => rank.busy, show: share, all: () => 1 },
  "prompt tokens/s": { of: (rank) => rank.prompt_s, show: number, all: () => null },
  "output tokens/s": { of: (rank) => rank.output_s, show: number, all: () => null },
  "cache hits": { of: (rank) => rank.hits, show: share, all: () => 1 },
  "TTFT p99": { of: (rank) => rank.ttft_p99_s, show: seconds, all: () => null },
  "TPOT p99": { of: (rank) => rank.tpot_p99_s, show: seconds, all: () => null },
  "KV fetch": { of: (rank) => rank.fetch_s, show: seconds, all: () => null },
  "KV sent/s": { of: (rank) => rank.kv_sent_bytes_s, show: bytes, all: () => null },
  "age of report": { of: (rank) => rank.age_s, show: (value) => (value === null ? "never" : age(value)), all: () => null },
  "failed": { of: (rank) => rank.failed, show: number, all: () => null },
};

// What of the KV memory is in use, as shares: of live requests, kept for other ranks, and reclaimable cache.
export function kvParts(rank) {
  if (!rank.kv_capacity || rank.kv_live === null || rank.kv_live === undefined) return null;
  const all = rank.kv_capacity, kept = rank.kv_pinned ?? 0, lent = rank.role === "decode";
  return { live: (lent ? rank.kv_live : Math.max(0, rank.kv_live - kept)) / all, kept: kept / all, cached: (rank.kv_cached ?? 0) / all };
}

export function kvShare(rank) { const parts = kvParts(rank); return parts && parts.live + parts.kept; }

// True if its figures are those that it reported before it stopped.
export const isOld = (rank) => DEAD.has(rank.state) || rank.state === "gone";
export const reportedAt = (rank, wall) => (rank.age_s === null ? "never" : `at ${clock(wall - rank.age_s)}, ${age(rank.age_s)} ago`);

export function stateOf(rank) {
  if (DEAD.has(rank.state)) return { word: rank.state, kind: "dead", tone: "bad", mark: "✕" };
  if (rank.state !== "ready") return { word: rank.state, kind: "away", tone: "note", mark: rank.state[0] };
  if (rank.condition) return { word: CONDITIONS[rank.condition], kind: "poor", tone: "warn", mark: rank.condition[0].toUpperCase() };
  return { word: "ready", kind: "ready", tone: "good", mark: "" };
}

export function known(value) { return value !== null && value !== undefined && !Number.isNaN(value); }

export function number(value) {
  if (!known(value)) return "–";
  for (const [factor, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= 0.9995 * factor) return `${(value / factor).toFixed(Math.abs(value) < 99.95 * factor ? 1 : 0)}${unit}`;
  return Number.isInteger(value) || Math.abs(value) >= 9.95 ? value.toFixed(0) : value.toFixed(1);
}

export function bytes(value) { return known(value) ? `${number(value)}B` : "–"; }
export function share(value) { return known(value) ? `${Math.round(100 * value)}%` : "–"; }

export function seconds(value) {
  if (!known(value)) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${(1e6 * value).toFixed(0)} µs`;
  if (value < 0.9995) return `${(1e3 * value).toFixed(value < 0.0095 ? 1 : 0)} ms`;
  return age(value);
}

export function age(value) {
  if (!known(value)) return "–";
  if (value < 99.5) return `${value < 9.95 && !Number.isInteger(value) ? value.toFixed(1) : value.toFixed(0)} s`;
  return value < 6000 ? `${(value / 60).toFixed(0)} min` : value < 360000 ? `${(value / 3600).toFixed(0)} h` : `${(value / 86400).toFixed(0)} d`;
}

export const clock = (wall) => new Date(1000 * wall).toLocaleTimeString("en-GB");
export const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

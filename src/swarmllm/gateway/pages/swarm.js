// The page of the swarm: asks every two seconds, and redraws changes.

import { showChoice } from "/static/models.js";
import { blocksOf, draw, nameOf, runs } from "/static/picture.js";
import { drawTimeline } from "/static/timeline.js";

const PERIOD_MS = 2000;
const byId = (id) => document.getElementById(id);
const rows = new Map();
let model = new URLSearchParams(location.search).get("model"); // null: the first
let swarm = null;
let etag = null;
let chosen = null;
let opened = null; // the model that this page had opened
let sorted = { column: "blocks", descending: false };
let numMinutes = 10; // of the time line

const precise = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const rounded = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const numbers = { format: (value) => (value >= 100 ? rounded : precise).format(value) };
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`);
const measured = (server, value) => (server.throughput > 0 ? value : null);

// Columns with `more` are hidden until the user shows all columns.
const COLUMNS = [
  { id: "name", title: "Server", value: nameOf },
  { id: "blocks", title: "Blocks", value: (s) => s.start * 10000 + s.end, text: (s) => blocksOf(swarm, s.start, s.end) },
  { id: "state", title: "State", value: (s) => [s.state, s.relayed && "relayed", s.identity_shared && "identity used twice"].filter(Boolean).join(", ") },
  { id: "machine", title: "Machine", more: true, value: (s) => s.machine?.slice(0, 6) || null },
  { id: "hardware", title: "Hardware", more: true, value: (s) => s.hardware || null },
  { id: "now", title: "Tokens/s now", number: true, value: (s) => s.tokens_per_s },
  { id: "throughput", title: "Tokens/s at most", number: true, value: (s) => measured(s, s.throughput) },
  { id: "decode", title: "ms/token", number: true, value: (s) => measured(s, s.decode_ms_per_block * (s.end - s.start)) },
  { id: "seen", title: "Seen ms", number: true, more: true, value: (s) => s.step_ms_p50 || null },
  { id: "sessions", title: "Sessions", number: true, value: (s) => s.num_sessions },
  { id: "load", title: "In use", number: true, value: (s) => s.load ?? s.cache_in_use, text: (s) => percent(s.load ?? s.cache_in_use) },
  { id: "cache", title: "Cache free", number: true, value: (s) => measured(s, s.cache_tokens_left), text: (s) => (s.throughput > 0 ? compact.format(s.cache_tokens_left) : "–") },
  { id: "memory", title: "Memory free", number: true, value: (s) => s.memory_left_bytes || null, text: (s) => (s.memory_left_bytes ? `${numbers.format(s.memory_left_bytes / 1e9)} GB` : "–") },
  { id: "weights", title: "Weights", more: true, value: (s) => (s.quant_type === "none" ? s.dtype : `${s.quant_type}, ${s.dtype}`) },
  { id: "round_trip", title: "Round trip", number: true, value: (s) => s.round_trip_ms, text: (s) => (s.round_trip_ms === null ? "–" : `${numbers.format(s.round_trip_ms)} ms`) },
  { id: "p95", title: "p95 ms", number: true, more: true, value: (s) => s.step_ms_p95 || null },
  { id: "served", title: "Served", number: true, more: true, value: (s) => s.tokens_served, text: (s) => compact.format(s.tokens_served) },
  { id: "failed", title: "Failed", number: true, more: true, value: (s) => s.failures_seen, text: (s) => compact.format(s.failures_seen) },
  { id: "version", title: "Version", more: true, value: (s) => s.version },
];

function textOf(column, server) {
  if (column.text) return column.text(server);
  const value = column.value(server);
  if (value === null || value === undefined) return "–";
  return column.number ? numbers.format(value) : String(value);
}

// ---------------------------------------------------------------- the table

const classOf = (column) => [column.number && "number", column.more && "more"].filter(Boolean).join(" ");

function head() {
  byId("table").tHead.rows[0].replaceChildren(
    ...COLUMNS.map((column) => {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.className = classOf(column);
      if (sorted.column === column.id) cell.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
      const button = document.createElement("button");
      button.textContent = column.title;
      button.addEventListener("click", () => {
        sorted = { column: column.id, descending: sorted.column === column.id ? !sorted.descending : Boolean(column.number) };
        head();
        table();
      });
      cell.append(button);
      return cell;
    }),
  );
}

function table() {
  const wanted = byId("filter").value.trim().toLowerCase();
  const column = COLUMNS.find((one) => one.id === sorted.column);
  const compare = (a, b) => {
    const [first, second] = [column.value(a) ?? -1, column.value(b) ?? -1];
    const order = first < second ? -1 : first > second ? 1 : a.peer_id < b.peer_id ? -1 : 1;
    return sorted.descending ? -order : order;
  };
  const shown = swarm.servers
    .filter((server) => !wanted || [server.peer_id, ...COLUMNS.map((one) => textOf(one, server))].join(" ").toLowerCase().includes(wanted))
    .sort(compare);
  const present = new Set(swarm.servers.map((server) => server.peer_id));
  for (const peer of rows.keys()) if (!present.has(peer)) rows.delete(peer);
  const body = byId("table").tBodies[0];
  const ordered = shown.map((server) => row(server));
  if (ordered.length !== body.rows.length || ordered.some((one, index) => body.rows[index] !== one)) body.replaceChildren(...ordered);
}

function row(server) {
  let one = rows.get(server.peer_id);
  if (!one) {
    one = document.createElement("tr");
    for (const column of COLUMNS) one.insertCell().className = classOf(column);
    one.cells[0].append(document.createElement("code"));
    one.addEventListener("click", () => choose(server.peer_id));
    rows.set(server.peer_id, one);
  }
  one.className = `${server.state}${server.peer_id === chosen ? " chosen" : ""}`;
  one.title = server.peer_id;
  COLUMNS.forEach((column, index) => {
    const holder = index ? one.cells[index] : one.cells[0].firstChild;
    const text = textOf(column, server);
    if (holder.textContent !== text) holder.textContent = text;
  });
  return one;
}

// ---------------------------------------------------------------- the rest

const WORDS = {
  joined: ["joined with blocks", "good"],
  left: ["left; it had blocks", ""],
  expired: ["has not come back; it had blocks", ""],
  unreachable: ["can’t be reached; it has blocks", "bad"],
  reachable: ["can be reached again, with blocks", "good"],
  online: ["is online with blocks", "good"],
  leaving: ["is leaving; it has blocks", ""],
  joining: ["is loading blocks", ""],
};

function events() {
  const list = byId("events");
  if (!swarm.events.length) {
    const none = document.createElement("li");
    const text = document.createElement("span");
    text.className = "none";
    text.textContent = "Nothing has happened since the gateway started.";
    none.style.display = "block";
    none.append(text);
    list.replaceChildren(none);
    return;
  }
  list.replaceChildren(
    ...swarm.events.map((event) => {
      const item = document.createElement("li");
      const time = document.createElement("time");
      const at = new Date(1000 * event.at);
      time.dateTime = at.toISOString();
      time.textContent = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
      const text = document.createElement("span");
      const blocks = blocksOf(swarm, ...event.blocks);
      if (event.kind === "moved") {
        text.textContent = `${nameOf(event)} moved from blocks ${blocksOf(swarm, ...event.previous_blocks)} to ${blocks}`;
      } else {
        const [words, kind] = WORDS[event.kind] ?? [`is now “${event.kind}”, with blocks`, ""];
        text.textContent = `${nameOf(event)} ${words} ${blocks}`;
        if (kind) text.className = kind;
      }
      item.append(time, text);
      return item;
    }),
  );
}

function number(id, value, unit) {
  const small = document.createElement("small");
  small.textContent = ` ${unit}`;
  byId(id).replaceChildren(value, small);
}

function advice() {
  const missing = runs(swarm.missing_blocks);
  const [first] = missing.map(([start, end]) => `${start}:${end}`);
  byId("advice").hidden = !first || !swarm.known;
  byId("advice").textContent = first
    ? `No chat can be answered without a server of ${missing.map((span) => blocksOf(swarm, ...span)).join(", ")}.${swarm.join === null ? "" : ` Start one with: ${swarm.join} --block_indices ${first}`}`
    : "";
  byId("join-card").hidden = swarm.join === null; // the machines start servers by themselves
  byId("to-machines").hidden = swarm.join !== null && !swarm.opens;
  if (swarm.join && byId("join").textContent !== swarm.join) byId("join").textContent = swarm.join;
}

function summary() {
  const online = swarm.servers.filter((server) => server.state === "online").length;
  const missing = swarm.missing_blocks.length;
  const verdict = byId("verdict");
  verdict.dataset.state = missing ? "bad" : "good";
  const words = swarm.opens
    ? `${swarm.model} is being opened here.`
    : swarm.waiting
    ? `Waiting for the swarm: ${swarm.waiting}.`
    : !swarm.known
    ? "Looking for servers…"
    : missing
      ? `${missing} of ${swarm.num_blocks} blocks ${missing === 1 ? "is" : "are"} served by nobody.`
      : `All ${swarm.num_blocks} blocks are served.`;
  const more = swarm.waiting || !swarm.known || missing ? "" : risk();
  if (verdict.textContent !== words + more) { // a screen reader says it only when it changes
    const next = document.createElement("span");
    next.textContent = more;
    verdict.replaceChildren(words, next);
  }
  byId("model").textContent = swarm.model;
  document.title = `${missing ? "⚠ " : ""}${swarm.model} · swarm`;
  number("online", String(online), `of ${swarm.servers.length}`);
  if (swarm.tokens_per_s === null) byId("traffic").textContent = "–";
  else number("traffic", numbers.format(swarm.tokens_per_s), "tokens/s");
  byId("about").textContent = describe(swarm.about);
  number("hops", String(swarm.route.length || "–"), swarm.route.length ? `hop${swarm.route.length === 1 ? "" : "s"}` : "");
  if (!swarm.expected_ms_per_token) byId("one-chat").textContent = "–";
  else number("one-chat", `≈ ${numbers.format(1000 / swarm.expected_ms_per_token)}`, "tokens/s");
  if (!swarm.bottleneck) byId("bottleneck").textContent = "–";
  else number("bottleneck", compact.format(swarm.bottleneck.tokens_per_s), `tokens/s, blocks ${blocksOf(swarm, ...swarm.bottleneck.blocks)}`);
}

// Blocks that the loss of one server would stop.
function risk() {
  const alone = swarm.held_by_one;
  if (!alone.length) return " Any one server can be lost.";
  const names = [...new Map(alone.map((one) => [one.peer_id, nameOf(one)])).values()]; // names may be equal
  const blocks = alone.map((one) => blocksOf(swarm, ...one.blocks)).join(", ");
  const lost = swarm.servers.some((server) => server.state === "unreachable") || swarm.history.slice(-numMinutes).some((minute) => minute.lost);
  const again = lost ? " too" : "";
  if (names.length === 1) return ` If ${names[0]} is lost${again}, every text stops: no other server has blocks ${blocks}.`;
  const any = names.length > 3 ? `any one of ${names.length} servers` : `${names.slice(0, -1).join(", ")} or ${names.at(-1)}`;
  return ` If ${any} is lost${again}, every text stops: no other servers have blocks ${blocks}.`;
}

function describe(about) {
  if (!about) return "";
  const facts = [about.architecture, `${compact.format(about.parameters)} parameters`, `${swarm.num_blocks} blocks`, `${about.context_tokens} tokens of context here`];
  return `${facts.join(" · ")}. `;
}

function choose(peer) {
  chosen = chosen === peer ? null : peer;
  picture();
  table();
  if (chosen) rows.get(chosen)?.scrollIntoView({ block: "nearest" });
}

function picture() {
  draw(byId("picture"), swarm, { chosen, onChoose: choose });
}

function timeline() {
  drawTimeline(byId("timeline"), swarm, numMinutes);
}

function show() {
  advice();
  summary();
  picture();
  timeline();
  table();
  events();
}

async function look() {
  try {
    const response = await fetch(model ? `/api/swarm?model=${encodeURIComponent(model)}` : "/api/swarm", { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" });
    if (response.status === 200) {
      etag = response.headers.get("etag");
      swarm = await response.json();
      show();
      if (swarm.opens && opened !== swarm.model) {
        opened = swarm.model;
        fetch(`/v1/models/${swarm.model.split("/").map(encodeURIComponent).join("/")}`).catch(() => {}); // asking opens it
      }
    } else if (response.status === 404) {
      model = null; // an old address: the gateway has other models now
    }
  } catch {
    const verdict = byId("verdict");
    verdict.dataset.state = "bad";
    verdict.textContent = "The gateway can’t be reached.";
    etag = null;
  }
}

// /health lists the models. The address names the one on the page.
async function findModels() {
  try {
    const health = await (await fetch("/health")).json();
    const names = (health.models ?? [health]).map((one) => one.model);
    showChoice(names, names.includes(model) ? model : names[0]);
  } catch {
    // `look` reports a lost gateway
  }
}

byId("copy-join").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(byId("join").textContent);
    byId("copy-join").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(byId("join")); // to be copied by hand
  }
  setTimeout(() => (byId("copy-join").textContent = "Copy"), 1500);
});
byId("longer").addEventListener("click", () => {
  numMinutes = numMinutes === 10 ? 60 : 10;
  byId("timeline-title").textContent = `The last ${numMinutes === 10 ? "ten minutes" : "hour"}`;
  byId("longer").textContent = `Show the last ${numMinutes === 10 ? "hour" : "ten minutes"}`;
  if (swarm) timeline();
});
byId("columns").addEventListener("click", () => {
  const all = byId("table").classList.toggle("all");
  byId("columns").textContent = all ? "Show fewer columns" : "Show all columns";
});
byId("models").addEventListener("change", () => {
  model = byId("models").value;
  history.replaceState(null, "", `?model=${encodeURIComponent(model)}`);
  [etag, chosen] = [null, null];
  look();
});

async function keepLooking() {
  if (!document.hidden) await look();
  setTimeout(keepLooking, PERIOD_MS);
}

document.addEventListener("visibilitychange", () => document.hidden || look());
byId("filter").addEventListener("input", () => swarm && table());
new ResizeObserver(() => {
  if (!swarm) return;
  picture();
  timeline();
}).observe(byId("picture"));
head();
findModels();
keepLooking();

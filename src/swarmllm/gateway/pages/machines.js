// The page of the machines: what each of them has, the models in use, the models to choose from. Asks every two seconds.
//
// Names come from other machines. They are only ever text of elements, never HTML.

import { forgetKey, pageKey } from "/static/key.js";
import { morph } from "/static/morph.js";

const PERIOD_MS = 2000;
const CATALOGUE_MS = 60_000;
const LATE_S = 15; // a machine that was not seen for so long is late
const byId = (id) => document.getElementById(id);
let picture = null;
let catalogue = null;
let asked = null; // the change that the dialog asks about
let previews = 0;

// ---------------------------------------------------------------- words and numbers

const precise = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const rounded = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const number = (value) => (value >= 100 ? rounded : precise).format(value);
const many = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
const gigabytes = (bytes) => (bytes >= 1e9 ? `${number(bytes / 1e9)} GB` : `${number(bytes / 1e6)} MB`);
const percent = (done, total) => `${Math.floor((100 * Math.min(done, total)) / total)} %`;
const speed = (perS) => `about ${number(perS)} tokens/s`;
const listed = (words) => (words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`);
const sum = (values) => values.reduce((total, value) => total + value, 0);

function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

// Show these elements in a list. Elements that are equal stay, with the focus.
function fill(id, ...children) {
  const now = byId(id).cloneNode();
  now.append(...children);
  morph(byId(id), now);
}

function bar(role, label, done, total, text) {
  const share = total > 0 ? Math.min(1, done / total) : 0;
  const inner = make("span", {});
  inner.style.width = `${(100 * share).toFixed(1)}%`;
  return make("div", { class: `level ${role}`, role, "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.floor(100 * share), "aria-valuetext": text }, inner);
}

// ---------------------------------------------------------------- asking the gateway

async function ask(path, body) {
  const headers = pageKey() ? { Authorization: `Bearer ${pageKey()}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(`/api/machines${path}`, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), cache: "no-store" });
  if (response.ok) return response.json();
  let message = `the gateway answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not from the gateway itself
  }
  if (response.status === 401) {
    forgetKey();
    mayCommand(false);
  }
  throw new Error(message);
}

function mayCommand(may) {
  document.documentElement.classList.toggle("commands", may);
  byId("looking").hidden = may;
  byId("add").hidden = !may;
}

// ---------------------------------------------------------------- models in use

const parts = (name) => picture.machines.flatMap((machine) => machine.hosted.filter((one) => one.model === name));

// The bytes that are here, and all of them; 0: some machine doesn't know yet how many it needs.
function progress({ name, hosts }) {
  const loading = parts(name).filter((one) => one.state !== "online" && one.state !== "leaving");
  const planned = hosts.filter((host) => !parts(name).some((one) => one.start === host.start && one.end === host.end));
  if (planned.length || loading.some((one) => !one.total_bytes)) return [0, 0];
  return [sum(loading.map((one) => Math.min(one.done_bytes, one.total_bytes))), sum(loading.map((one) => one.total_bytes))];
}

function stateOf(model) {
  if (model.state === "does not fit" && model.missing_bytes) return `does not fit: ${gigabytes(model.missing_bytes)} of memory are missing`;
  return model.state;
}

// The blocks from left to right, and which machine has them. Replicas are below each other.
function strip(model) {
  if (!model.num_blocks || !model.hosts.length) return null;
  const list = make("ol", { class: "strip", "aria-label": `Blocks of ${model.name}` });
  list.style.gridTemplateColumns = `repeat(${model.num_blocks}, minmax(0, 1fr))`;
  for (const host of [...model.hosts].sort((a, b) => a.start - b.start || a.end - b.end)) {
    const blocks = `${host.start}:${host.end}`;
    const machine = picture.machines.find((one) => one.peer_id === host.peer_id);
    const part = machine?.hosted.find((one) => one.model === model.name && one.start === host.start && one.end === host.end);
    const state = part?.state ?? "waiting";
    const item = make("li", { class: state === "online" ? "online" : "coming", title: `${host.machine}: blocks ${blocks}, ${state}` }, make("span", { class: "who" }, host.machine), " ", make("span", { class: "blocks" }, blocks));
    item.style.gridColumn = `${host.start + 1} / ${host.end + 1}`;
    list.append(item);
  }
  return list;
}

function modelItem(model) {
  const [done, total] = progress(model);
  const loads = model.state === "loading" && total > 0;
  const told = `${gigabytes(done)} of ${gigabytes(total)} are here, ${percent(done, total)}`;
  const facts = [model.state === "does not fit" ? stateOf(model) : "", model.num_blocks ? many(model.num_blocks, "block") : "", model.quant_type && model.quant_type !== "auto" ? model.quant_type : "", model.one_tokens_per_s ? `${speed(model.one_tokens_per_s)} expected for one text` : ""];
  return make(
    "li",
    {},
    make("div", { class: "row" }, make("h3", {}, model.name), make("span", { class: `state ${model.state.replaceAll(" ", "-")}` }, model.state), make("span", { class: "spring" }),
      model.state === "ready" ? make("a", { class: "button plain", href: `/swarm?model=${encodeURIComponent(model.name)}` }, "Servers") : null,
      model.state === "ready" ? make("a", { class: "button", href: `/?model=${encodeURIComponent(model.name)}` }, "Chat") : null,
      make("button", { class: "button for-members", type: "button", "data-drop": model.name, "aria-label": `Drop ${model.name}` }, "Drop")),
    make("p", { class: "facts" }, facts.filter(Boolean).join(" · ")),
    loads ? bar("progressbar", `Loading ${model.name}`, done, total, told) : null,
    loads ? make("p", { class: "facts" }, told) : null,
    strip(model),
    model.problem ? make("p", { class: "problem" }, model.problem) : null,
  );
}

function models() {
  const none = make("li", { class: "none" }, "No model is in use. Choose one below: the machines load it together.");
  fill("models", ...(picture.models.length ? picture.models.map(modelItem) : [none]));
  fill("leaving", ...picture.leaving.map((one) => make("li", { class: "none" }, `${one.name} is on its way out${one.sessions ? `: ${many(one.sessions, "session")} still use${one.sessions === 1 ? "s" : ""} it` : ""}.`)));
}

// ---------------------------------------------------------------- machines

function partItem(one) {
  const loads = one.total_bytes > 0 && ["waiting", "fetching", "loading"].includes(one.state);
  const from = [one.bytes_from_machines ? `${gigabytes(one.bytes_from_machines)} from other machines` : "", one.bytes_from_hub ? `${gigabytes(one.bytes_from_hub)} from the hub` : ""].filter(Boolean);
  const told = loads ? [`${gigabytes(one.done_bytes)} of ${gigabytes(one.total_bytes)}`, ...from].join(", ") : "";
  return make(
    "li",
    {},
    make("p", { class: "facts" }, make("span", { class: "name" }, one.model), `${one.state === "failed" ? "" : ` · blocks ${one.start}:${one.end}`} · ${one.state}${told ? ` · ${told}` : ""}`),
    loads ? bar("progressbar", `Loading ${one.model}`, one.done_bytes, one.total_bytes, told) : null,
    one.problem ? make("p", { class: "problem" }, one.problem) : null,
  );
}

function machineItem(machine) {
  const memory = machine.memory_bytes ? `${gigabytes(machine.used_bytes)} of ${gigabytes(machine.memory_bytes)} of memory in use` : "";
  const late = machine.seen_s > LATE_S ? `not seen for ${number(machine.seen_s)} s` : "";
  const way = machine.round_trip_ms === null || machine.round_trip_ms === undefined ? "" : `${number(machine.round_trip_ms)} ms away`;
  const disk = machine.disk_left_bytes ? `${gigabytes(machine.disk_left_bytes)} free on the disk` : "";
  const kept = machine.kept_bytes ? `${gigabytes(machine.kept_bytes)} of models that nobody uses now` : "";
  return make(
    "li",
    {},
    make("div", { class: "row" }, make("h3", { title: machine.peer_id }, machine.name || machine.peer_id.slice(-8)), machine.is_here ? make("span", { class: "state" }, "this machine") : null, late ? make("span", { class: "state late" }, late) : null),
    memory ? bar("meter", `Memory of ${machine.name || machine.peer_id.slice(-8)}`, machine.used_bytes, machine.memory_bytes, memory) : null,
    make("p", { class: "facts" }, [memory, disk, kept, way].filter(Boolean).join(" · ")),
    machine.hosted.length ? make("ul", { class: "plain-list parts" }, ...machine.hosted.map(partItem)) : null,
  );
}

function machines() {
  const order = [...picture.machines].sort((a, b) => Number(b.is_here) - Number(a.is_here) || (a.name < b.name ? -1 : a.name > b.name ? 1 : a.peer_id < b.peer_id ? -1 : 1));
  fill("machines", ...order.map(machineItem));
}

// ---------------------------------------------------------------- commands, head

function log() {
  const none = make("li", { class: "none" }, "Nothing was commanded yet.");
  const items = [...picture.commands].sort((a, b) => b.number - a.number).map((one) => {
    const at = new Date(1000 * one.at);
    return make("li", {}, make("time", { datetime: at.toISOString(), title: at.toLocaleString() }, at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false })), make("span", { title: one.peer_id }, `${one.by}: ${one.what}`));
  });
  fill("events", ...(items.length ? items : [none]));
}

function verdict() {
  const { models: used } = picture;
  const ready = used.filter((one) => one.state === "ready").map((one) => one.name);
  const stuck = used.filter((one) => one.problem || one.state === "does not fit" || one.state === "incomplete");
  const coming = used.filter((one) => !ready.includes(one.name) && !stuck.includes(one));
  const words = []; // the first is said loudest
  if (ready.length) words.push(`${listed(ready)} ${ready.length === 1 ? "is" : "are"} ready.`);
  for (const one of coming) {
    const [done, total] = progress(one);
    const is = one.state !== "loading" ? "being planned" : total && done >= total ? "starting" : `being loaded${total ? `: ${percent(done, total)}` : ""}`;
    words.push(`${one.name} is ${is}.`);
  }
  for (const one of stuck) words.push(one.problem ? `${one.name} can’t go on: ${one.problem}` : one.state === "does not fit" ? `${one.name} ${stateOf(one)}.` : `${one.name} is incomplete.`);
  if (!used.length) words.push("No model is in use yet.");
  byId("verdict").dataset.state = stuck.length && !ready.length ? "bad" : "good";
  const [first, ...others] = words;
  const rest = others.length ? make("span", {}, ` ${others.join(" ")}`) : null;
  morph(byId("verdict"), make("p", {}, first, ...(rest ? [rest] : []))); // a screen reader says it when it changes
  const memory = sum(picture.machines.map((one) => one.memory_bytes));
  byId("lead").textContent = `${many(picture.machines.length, "machine")}${memory ? ` with ${gigabytes(memory)} of memory for models` : ""}. ${picture.swarm.open ? "Machines of this local network may join without an invite." : "Machines join with an invite."}`;
  byId("swarm").textContent = picture.swarm.name ? `Machines of ${picture.swarm.name}` : "Machines";
  document.title = `${stuck.length ? "⚠ " : ""}${picture.swarm.name || "swarm"} · machines`;
}

// ---------------------------------------------------------------- models to choose from

function choice(one) {
  const used = picture?.models.some((model) => model.name === one.model);
  const about = one.problem ? `can’t be served: ${one.problem}` : one.text ?? "";
  const where = one.is_here ? "on this machine" : "on the hub";
  return make(
    "li",
    {},
    make("div", { class: "row" }, make("h3", {}, one.model), make("span", { class: "state" }, where), make("span", { class: "spring" }),
      used ? make("span", { class: "facts" }, "in use") : null,
      !used && one.fits ? make("button", { class: "button for-members", type: "button", "data-use": one.model, "aria-label": `Use ${one.model}` }, "Use") : null),
    make("p", { class: one.fits ? "facts" : "facts unfit" }, [about, one.num_blocks ? many(one.num_blocks, "block") : ""].filter(Boolean).join(" · ")),
  );
}

function choices() {
  if (!catalogue) return;
  const text = byId("wanted").value.trim();
  const found = catalogue.filter((one) => one.model.toLowerCase().includes(text.toLowerCase()));
  const other = text && !catalogue.some((one) => one.model === text) ? [make("li", { class: "for-members" }, make("div", { class: "row" }, make("h3", {}, text), make("span", { class: "state" }, "not in this list"), make("span", { class: "spring" }), make("button", { class: "button", type: "button", "data-use": text, "aria-label": `Use ${text}` }, "Use")))] : [];
  byId("listing").textContent = found.length || other.length ? "" : text ? "No model of this list has that in its name." : "No models are known here: name one by its hub id, or by its path on this machine.";
  byId("listing").hidden = !byId("listing").textContent;
  fill("catalogue", ...found.map(choice), ...other);
}

async function list() {
  try {
    ({ models: catalogue } = await ask("/models"));
    choices();
  } catch (error) {
    if (!catalogue) byId("listing").textContent = `The list can’t be made now: ${error.message}`;
  }
}

// ---------------------------------------------------------------- a change, shown before it is commanded

const hostsOf = (hosts) => (hosts.length ? hosts.map((one) => `${one.machine} ${one.start}:${one.end}`).join(", ") : "nowhere");

function side(title, plans) {
  const names = Object.keys(plans);
  return make("div", {}, make("h3", {}, title), make("ul", { class: "plain-list" }, ...(names.length ? names.map((name) => make("li", {}, make("span", { class: "name" }, name), make("br", {}), make("span", { class: "facts" }, hostsOf(plans[name])))) : [make("li", { class: "facts" }, "no model")])));
}

function shown(preview) {
  const loaded = Object.entries(preview.loaded_bytes);
  const facts = [
    preview.missing_bytes ? `It does not fit: ${gigabytes(preview.missing_bytes)} of memory are missing.` : "",
    loaded.length ? `To be loaded: ${loaded.map(([name, bytes]) => `${gigabytes(bytes)} on ${name}`).join(", ")}.` : "",
    preview.one_tokens_per_s ? `Expected: ${speed(preview.one_tokens_per_s)} for one text${preview.all_tokens_per_s ? `, ${speed(preview.all_tokens_per_s)} for all together` : ""}.` : "",
  ];
  return [make("div", { class: "sides" }, side("Now", preview.before), side("Then", preview.after)), ...facts.filter(Boolean).map((text) => make("p", {}, text))];
}

async function showPreview() {
  const mine = ++previews; // the newest one counts
  byId("yes").disabled = true;
  byId("change").replaceChildren(make("p", { class: "facts" }, "Planning…"));
  try {
    const preview = await ask("/preview", { model: asked.use, add: asked.add });
    if (mine !== previews) return;
    byId("change").replaceChildren(...shown(preview));
    byId("yes").disabled = preview.missing_bytes > 0;
  } catch (error) {
    if (mine === previews) byId("change").replaceChildren(make("p", { class: "problem" }, error.message));
  }
}

function open(title, button) {
  byId("wrong").hidden = true;
  byId("ask-title").textContent = title;
  byId("yes").textContent = button;
  byId("ask").returnValue = "no";
  byId("ask").showModal();
}

function askToUse(model) {
  const used = picture.models.map((one) => one.name);
  asked = { use: model, add: false };
  byId("how").hidden = !used.length;
  const [instead, besides] = byId("how").querySelectorAll("span");
  instead.textContent = `In place of ${listed(used)}`;
  besides.textContent = `Besides ${listed(used)}`;
  byId("how").querySelector("input").checked = true;
  open(`Use ${model}?`, "Use it");
  showPreview();
}

function askToDrop(name) {
  asked = { drop: name };
  previews += 1;
  byId("how").hidden = true;
  byId("change").replaceChildren(make("p", {}, "Answers under way go on to their end. Then the machines free its memory."));
  byId("yes").disabled = false;
  open(`Drop ${name}?`, "Drop it");
}

async function command() {
  const change = asked;
  asked = null;
  previews += 1;
  if (byId("ask").returnValue !== "yes" || !change) return;
  try {
    await (change.use ? ask("/use", { model: change.use, add: change.add }) : ask("/drop", { name: change.drop }));
    if (change.use) byId("wanted").value = "";
  } catch (error) {
    byId("wrong").textContent = `That was not done: ${error.message}.`;
    byId("wrong").hidden = false;
  }
  await look();
  choices();
}

// ---------------------------------------------------------------- adding a machine

const NS = "http://www.w3.org/2000/svg";
const QUIET = 4; // margin of a QR code, in modules

function qrCode(rows) {
  const size = rows.length + 2 * QUIET;
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", `0 0 ${size} ${size}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "QR code of this page’s address");
  const ground = document.createElementNS(NS, "rect");
  ground.setAttribute("width", size);
  ground.setAttribute("height", size);
  ground.setAttribute("class", "ground");
  const dark = document.createElementNS(NS, "path");
  dark.setAttribute("d", rows.flatMap((row, y) => [...row].map((one, x) => (one === "1" ? `M${x + QUIET} ${y + QUIET}h1v1h-1z` : ""))).join(""));
  svg.append(ground, dark);
  return svg;
}

async function invite() {
  mayCommand(Boolean(pageKey()));
  if (!pageKey()) return;
  try {
    const { command: line, qr } = await ask("/invite");
    byId("line").textContent = line;
    byId("phone").hidden = !qr;
    if (qr) byId("qr").replaceChildren(qrCode(qr));
  } catch {
    // the key was wrong, or `look` reports a lost gateway
  }
}

byId("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(byId("line").textContent);
    byId("copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(byId("line")); // to be copied by hand
  }
  setTimeout(() => (byId("copy").textContent = "Copy"), 1500);
});

// ---------------------------------------------------------------- looking

async function look() {
  try {
    picture = await ask("");
  } catch {
    byId("verdict").dataset.state = "bad";
    byId("verdict").textContent = `The gateway can’t be reached.${picture ? " This page shows the last that it knew." : ""}`;
    return;
  }
  byId("all").classList.add("seen");
  verdict();
  models();
  machines();
  log();
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest?.("button[data-use], button[data-drop]");
  if (!button) return;
  if (button.dataset.use !== undefined) askToUse(button.dataset.use);
  else askToDrop(button.dataset.drop);
});
byId("how").addEventListener("change", ({ target }) => {
  asked.add = target.value === "add";
  showPreview();
});
byId("ask").addEventListener("close", command);
byId("wanted").addEventListener("input", choices);
addEventListener("hashchange", invite);
document.addEventListener("visibilitychange", () => document.hidden || look());

async function keepLooking() {
  if (!document.hidden) {
    const before = picture && JSON.stringify([picture.machines.map((one) => one.peer_id), picture.models.map((one) => one.name)]);
    await look();
    if (before && before !== JSON.stringify([picture.machines.map((one) => one.peer_id), picture.models.map((one) => one.name)])) list();
  }
  setTimeout(keepLooking, PERIOD_MS);
}

await invite();
keepLooking();
list();
setInterval(() => document.hidden || list(), CATALOGUE_MS);

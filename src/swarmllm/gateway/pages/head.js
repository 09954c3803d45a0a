// The head of the chat page: the model that answers, and the state of its swarm. Models may come and go.

import "/static/key.js";
import * as api from "/static/api.js";
import { showChoice } from "/static/models.js";
import * as store from "/static/store.js";

const byId = (id) => document.getElementById(id);

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
let models = [];
let changed = () => {};
let turn = 0; // counts choices: the newest one counts
let opening = null; // the name of the model that is being opened
export let model = null; // the chosen model; null: none is known yet

// `listener()` is called when another model is chosen.
export function onModel(listener) {
  changed = listener;
}

export async function health() {
  const pill = byId("health");
  if (opening) return;
  try {
    if (model) await follow();
    const swarm = await api.swarm(model);
    if (swarm.waiting && !swarm.opens) {
      waits(swarm);
      return;
    }
    if (!model) await begin();
    if (!model || swarm.waiting) return; // `choose` looks again
    byId("waits").textContent = "";
    const usable = swarm.servers.filter((server) => server.state === "online").length;
    const servers = `${usable} server${usable === 1 ? "" : "s"}`;
    const missing = swarm.missing_blocks.length;
    pill.dataset.state = missing ? "bad" : "good";
    byId("health-text").textContent = missing ? `${missing} of ${swarm.num_blocks} blocks missing` : servers;
    byId("about").textContent = describe(swarm, servers);
  } catch {
    pill.dataset.state = "bad";
    byId("health-text").textContent = "no gateway";
  }
}

function waits(swarm) {
  byId("health").dataset.state = "bad";
  byId("health-text").textContent = swarm.model ? "waiting" : "no model";
  if (swarm.model) {
    byId("waits").textContent = `Waiting for the swarm: ${swarm.waiting}.`;
    return;
  }
  byId("model").textContent = "no model";
  const link = document.createElement("a");
  link.href = "/swarm";
  link.textContent = "Choose one";
  byId("waits").replaceChildren("No model is served now. ", link, ".");
}

// The model, its size, and its servers.
function describe({ about, model: name, num_blocks: blocks }, servers) {
  if (!about) return "";
  const size = `${compact.format(about.parameters)} parameters`;
  return `${name} has ${size} in ${blocks} blocks, on ${servers} now. It reads up to ${compact.format(about.context_tokens)} tokens.`;
}

const chats = (listed) => listed.filter((one) => !one.embeddings && !one.audio);

export async function begin() {
  try {
    models = chats(await api.models());
    await choose(new URLSearchParams(location.search).get("model") ?? store.settings.model);
  } catch (error) {
    byId("model").textContent = "no model";
    if (error.status === 503) return; // the gateway waits: `health` tries again
    if (error.status === 401) byId("settings").showModal();
  }
}

// Take over a list that has changed. A chosen model that is gone makes room for another one.
async function follow() {
  let now;
  try {
    now = chats(await api.models());
  } catch {
    return; // `health` reports a lost gateway
  }
  const ids = (list) => list.map((one) => one.id).join("\n");
  if (ids(now) === ids(models)) return;
  models = now.map((one) => models.find((known) => known.id === one.id) ?? one);
  if (models.some((one) => one.id === model.id)) {
    showChoice(models.map((one) => one.id), model.id);
    return;
  }
  model = null;
  changed();
}

// A model that the gateway has not opened yet has a name only. Asking for it opens it.
async function opened(one) {
  if (one.max_model_len) return one;
  opening = one.id;
  byId("health-text").textContent = "opening…";
  byId("waits").textContent = `${one.id} is being opened here, for its first use.`;
  try {
    return await api.model(one.id);
  } catch (error) {
    byId("health").dataset.state = "bad";
    byId("health-text").textContent = "not open";
    byId("waits").textContent = `${error.message}.`;
    return null;
  } finally {
    opening = null;
  }
}

// The model that was used last, if it is still there.
async function choose(id) {
  const mine = ++turn;
  const wanted = models.find((one) => one.id === id) ?? models[0];
  if (!wanted) return;
  byId("model").textContent = wanted.id;
  showChoice(models.map((one) => one.id), wanted.id);
  if (model && !wanted.max_model_len) {
    model = null; // a message that is sent now waits for the new model
    changed();
  }
  const found = await opened(wanted);
  if (!found || mine !== turn) return;
  models = chats(models.map((one) => (one.id === found.id ? found : one)));
  if (!models.includes(found)) { // it can't chat
    await choose(null);
    return;
  }
  model = found;
  byId("waits").textContent = "";
  byId("health").href = models.length > 1 ? `/swarm?model=${encodeURIComponent(model.id)}` : "/swarm";
  showChoice(models.map((one) => one.id), model.id);
  changed();
  health();
}

byId("models").addEventListener("change", () => {
  store.settings.model = byId("models").value;
  store.saveSettings();
  choose(store.settings.model);
});
byId("settings").addEventListener("close", () => {
  if (!model) begin();
});
setInterval(() => document.hidden || health(), 5000);

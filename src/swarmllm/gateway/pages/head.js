// The head of the chat page: the model that answers, and the state of its swarm.

import * as api from "/static/api.js";
import { showChoice } from "/static/models.js";
import * as store from "/static/store.js";

const byId = (id) => document.getElementById(id);

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
let models = [];
let changed = () => {};
export let model = null; // the chosen model; null: none is known yet

// `listener()` is called when another model is chosen.
export function onModel(listener) {
  changed = listener;
}

export async function health() {
  const pill = byId("health");
  try {
    const swarm = await api.swarm(model);
    byId("waits").textContent = swarm.waiting ? `Waiting for the swarm: ${swarm.waiting}.` : "";
    if (swarm.waiting) {
      pill.dataset.state = "bad";
      byId("health-text").textContent = "waiting";
      return;
    }
    if (!model) await begin();
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

// The model, its size, and its servers.
function describe({ about, model: name, num_blocks: blocks }, servers) {
  if (!about) return "";
  const size = `${compact.format(about.parameters)} parameters`;
  return `${name} has ${size} in ${blocks} blocks, on ${servers} now. It reads up to ${compact.format(about.context_tokens)} tokens.`;
}

export async function begin() {
  try {
    models = (await api.models()).filter((one) => !one.embeddings && !one.audio); // these can't chat
    choose(store.settings.model);
  } catch (error) {
    byId("model").textContent = "no model";
    if (error.status === 503) return; // the gateway waits: `health` tries again
    if (error.status === 401) byId("settings").showModal();
  }
}

// The model that was used last, if it is still there.
function choose(id) {
  model = models.find((one) => one.id === id) ?? models[0];
  byId("model").textContent = model.id;
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

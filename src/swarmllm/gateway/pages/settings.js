// The dialog of settings: for all conversations, and the system prompt of this one.

import * as store from "/static/store.js";

const byId = (id) => document.getElementById(id);

// `opened()` is the open conversation, or null; `keep` saves it.
export function settingsOf(opened, keep) {
  byId("open-settings").addEventListener("click", () => {
    const open = opened();
    byId("own").hidden = !open;
    byId("own-system").value = open?.system ?? "";
    byId("settings").showModal();
  });
  byId("own-system").addEventListener("change", () => {
    const open = opened();
    open.system = byId("own-system").value.trim();
    keep(open);
  });
}

byId("reset").addEventListener("click", () => {
  for (const input of document.querySelectorAll("[data-setting]")) {
    input.value = "";
    delete store.settings[input.dataset.setting];
  }
  store.saveSettings();
});
export function showSettings() {
  for (const input of document.querySelectorAll("[data-setting]")) input.value = store.settings[input.dataset.setting] ?? "";
}
for (const input of document.querySelectorAll("[data-setting]")) {
  input.addEventListener("change", () => {
    if (input.value.trim() && input.checkValidity()) store.settings[input.dataset.setting] = input.value.trim();
    else delete store.settings[input.dataset.setting];
    store.saveSettings();
  });
}

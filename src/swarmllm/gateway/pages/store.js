// Conversations and settings, kept in this browser only.

const CONVERSATIONS = "swarmllm.conversations";
const SETTINGS = "swarmllm.settings";
const MOST = 200;

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // storage is forbidden, or was written by something else
  }
}

let conversations = read(CONVERSATIONS, []);
if (!Array.isArray(conversations)) conversations = [];

export const all = () => conversations;
export const find = (id) => conversations.find((one) => one.id === id);

export function create() {
  const conversation = { id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`, title: "", messages: [] };
  conversations.unshift(conversation);
  return conversation;
}

export function remove(id) {
  conversations = conversations.filter((one) => one.id !== id);
  save();
}

export function save() {
  conversations = conversations.filter((one) => one.messages.length).slice(0, MOST);
  for (;;) {
    try {
      localStorage.setItem(CONVERSATIONS, JSON.stringify(conversations));
      return;
    } catch {
      if (conversations.length <= 1) return; // not even one fits: it lives until the page is left
      conversations = conversations.slice(0, -1); // the oldest makes room
    }
  }
}

export const settings = read(SETTINGS, {});

export function saveSettings() {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // they hold until the page is left
  }
}

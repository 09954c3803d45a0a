// Conversations and settings, kept in this browser only and shared by its tabs.
//
// Each conversation has its own key, so tabs don't overwrite each other's; tabs hear of what others write
// (`onChange`). If two tabs continue one at the same time, it becomes two: no message is lost.
//
// An answer has `writing` until it is complete. If its page is lost before, the next page says so (`breakOff`).

const ALL_IN_ONE = "swarmllm.conversations"; // older pages wrote one array
const CONVERSATION = "swarmllm.conversation.";
const SETTINGS = "swarmllm.settings";

const ASK_MS = 1000; // for other tabs to answer

const newId = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
const isConversation = (one) => typeof one?.id === "string" && Array.isArray(one.messages);

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null; // storage is forbidden, or another program wrote it
  }
}

// Returns true if there was room.
function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function forget(key) {
  try {
    localStorage.removeItem(key);
  } catch {
    // nothing can be stored, so nothing is
  }
}

function adoptOlder() {
  const older = read(ALL_IN_ONE);
  if (!Array.isArray(older)) return;
  forget(ALL_IN_ONE); // first: there may be no room for both
  for (const one of older) {
    if (isConversation(one) && !read(CONVERSATION + one.id)) write(CONVERSATION + one.id, { ...one, revision: newId() });
  }
}

function stored() {
  try {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(CONVERSATION));
    return keys.map(read).filter(isConversation);
  } catch {
    return [];
  }
}

adoptOlder();
const conversations = new Map(stored().map((one) => [one.id, one]));
let tell = () => {};

export const all = () => [...conversations.values()].sort((one, other) => (one.id < other.id ? 1 : -1)); // newest first
export const find = (id) => conversations.get(id);

// Conversations that this tab is writing to: they don't follow what other tabs write.
export const writing = new Set();

// `listener(conversation, what)` is called after changes by other tabs: "changed", "deleted", or (null, "settings").
export function onChange(listener) {
  tell = listener;
}

// Mark an answer as broken off.
export function breakOff(message, text) {
  delete message.writing;
  message.notices = [...(message.notices ?? []), { kind: "", cut: true, text }];
}

export const PAGE_LEFT = "The page was left, so the answer ends here.";
const tabs = new BroadcastChannel("swarmllm");
const lost = new Set(all().filter((one) => one.messages.at(-1)?.writing)); // unless another tab says that it writes them

tabs.addEventListener("message", ({ data: { ask, writes } }) => {
  if (ask && [...writing].some((one) => one.id === ask)) tabs.postMessage({ writes: ask });
  if (writes) lost.delete(find(writes));
});
for (const one of lost) tabs.postMessage({ ask: one.id });
setTimeout(() => {
  for (const one of lost) {
    const message = one.messages.at(-1);
    if (!message?.writing || writing.has(one)) continue;
    breakOff(message, PAGE_LEFT);
    save(one);
    tell(one, "changed");
  }
}, ASK_MS);

export function create() {
  const conversation = { id: newId(), title: "", messages: [] };
  conversations.set(conversation.id, conversation);
  return conversation;
}

// Undo a removal.
export function restore(conversation) {
  delete conversation.revision;
  conversations.set(conversation.id, conversation);
  save(conversation);
}

export function remove(id) {
  conversations.delete(id);
  forget(CONVERSATION + id);
}

// Returns false if there is no room: then it lives until the page is left.
export function save(conversation) {
  if (conversations.get(conversation.id) !== conversation || !conversation.messages.length) return true; // deleted, or empty
  const known = read(CONVERSATION + conversation.id);
  const before = conversation.revision;
  if (before && !known) {
    remove(conversation.id);
    tell(conversation, "deleted");
    return true;
  }
  if (known && known.revision !== before) {
    conversations.set(known.id, known);
    conversation.id = newId();
    conversations.set(conversation.id, conversation);
    tell(known, "changed");
  }
  conversation.revision = newId();
  if (write(CONVERSATION + conversation.id, conversation)) return true;
  conversation.revision = before;
  return false;
}

export const settings = { ...read(SETTINGS) };

// Returns true if there was room; else they hold until the page is left.
export const saveSettings = () => write(SETTINGS, settings);

addEventListener("storage", ({ key }) => {
  if (key === SETTINGS || key === null) {
    for (const name of Object.keys(settings)) delete settings[name];
    Object.assign(settings, read(SETTINGS));
    tell(null, "settings");
  }
  if (key?.startsWith(CONVERSATION)) follow(key.slice(CONVERSATION.length));
  if (key === null) [...conversations.keys()].forEach(follow); // everything was cleared
});

function follow(id) {
  const known = conversations.get(id);
  const now = read(CONVERSATION + id);
  if (isConversation(now)) {
    if (writing.has(known) || known?.revision === now.revision) return;
    conversations.set(id, Object.assign(known ?? {}, now));
    tell(conversations.get(id), "changed");
  } else if (known?.revision) {
    conversations.delete(id);
    tell(known, "deleted");
  }
}

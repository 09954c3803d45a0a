// Tells before sending that a message is too long for the model.

import * as api from "/static/api.js";
import { model } from "/static/head.js";

const byId = (id) => document.getElementById(id);
const PAUSE_MS = 400;
const TEMPLATE_TOKENS = 64; // more than a chat template adds to a message
const bytes = (text) => new TextEncoder().encode(text).length;
const numbers = new Intl.NumberFormat("en");
let pause = 0;
let last = 0;

// A token is at least a byte, so most messages needn't be counted.
function surelyFits(messages, system) {
  const most = [system ?? "", ...messages.map(({ content }) => content)].reduce((sum, text) => sum + bytes(text) + TEMPLATE_TOKENS, 0);
  return most < model.max_model_len;
}

async function excess(messages, system) {
  try {
    const { count, max_model_len: most } = await api.count(model, messages, system);
    if (count < most) return "";
    const whole = messages.length > 1 ? "With the conversation so far, this message has" : "This message has";
    const mend = messages.length > 1 ? "Shorten it, or begin a new conversation." : "Shorten it.";
    return `${whole} ${numbers.format(count)} tokens; ${model.id} takes ${numbers.format(most)} with its answer. ${mend}`;
  } catch (error) {
    return error.status === 413 ? `This message is too long: ${error.message}.` : ""; // another error comes with the answer
  }
}

// Returns true if `messages` are too long, and says so on the page. Pictures aren't counted.
export async function isTooLong(messages, system) {
  clearTimeout(pause);
  const turn = ++last;
  const words = surelyFits(messages, system) ? "" : await excess(messages, system);
  if (turn === last) byId("long").textContent = words; // otherwise the text has changed meanwhile
  return Boolean(words);
}

// The same after a pause in typing. `draft()` gives messages and system prompt.
export function measureSoon(draft) {
  clearTimeout(pause);
  pause = setTimeout(() => model && isTooLong(...draft()), PAUSE_MS);
}

// A model's Markdown as harmless HTML: no scripts, styles or forms, and nothing that loads by itself.
// KaTeX sets formulas; one that it can't read stays as text.

import DOMPurify from "/static/vendor/purify.js";
import "/static/vendor/katex.js"; // sets `katex`
import { marked } from "/static/vendor/marked.js";

const INLINE_FORMULA = /^\\\((.+?)\\\)|^\$(?![\s$])([^$\n]*?[^\s$\\])\$(?!\d)/;
const BLOCK_FORMULA = /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])(?:\n|$)?/;
const LONGEST_FORMULA = 4000; // characters
const MOST_KEPT = 500;
const kept = new Map(); // cache of formulas as elements: a growing text is rendered many times a second

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

function formulaRule(name, level, rule, start) {
  return {
    name,
    level,
    start: (text) => text.match(start)?.index,
    tokenizer(text) {
      const found = rule.exec(text);
      return found ? { type: name, raw: found[0], text: (found[1] ?? found[2]).trim() } : undefined;
    },
    renderer: ({ raw, text }) => `<code class="${name}" title="${escaped(raw)}">${escaped(text)}</code>`,
  };
}

marked.use({
  gfm: true,
  breaks: true,
  async: false,
  extensions: [
    formulaRule("math-block", "block", BLOCK_FORMULA, /\$\$|\\\[/),
    formulaRule("math-inline", "inline", INLINE_FORMULA, /\$|\\\(/),
  ],
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a", "h1", "h2", "h3", "h4",
    "h5", "h6", "table", "thead", "tbody", "tr", "th", "td", "sub", "sup", "kbd", "mark", "u", "small", "details", "summary",
    "input",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class", "type", "checked"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["start", "align", "type", "checked"], // no links of other kinds
  RETURN_DOM_FRAGMENT: true,
};

export function markdown(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const one of fragment.querySelectorAll("[class]")) {
    if (one.nodeName !== "CODE" || !/^(language-[\w+#.-]{1,24}|math-block|math-inline)$/.test(one.className)) one.removeAttribute("class");
  }
  for (const input of fragment.querySelectorAll("input")) dressTask(input);
  for (const code of fragment.querySelectorAll("code.math-block, code.math-inline")) {
    code.replaceWith(formula(code.textContent, code.className === "math-block") ?? code.title);
  }
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of fragment.querySelectorAll("pre")) block.tabIndex = 0; // it may be wider than the screen
  return fragment;
}

// The box of a task in a list; no other field stays.
function dressTask(input) {
  const item = input.closest("li");
  if (input.type !== "checkbox" || !item) {
    input.remove();
    return;
  }
  input.disabled = true;
  input.setAttribute("aria-label", input.checked ? "done" : "to do");
  item.className = "task";
}

// The formula as an element, or null if KaTeX can't read it.
function formula(text, isBlock) {
  if (text.length > LONGEST_FORMULA) return null;
  const key = `${isBlock}${text}`;
  if (!kept.has(key)) {
    if (kept.size >= MOST_KEPT) kept.clear();
    kept.set(key, render(text, isBlock));
  }
  return kept.get(key)?.cloneNode(true) ?? null;
}

function render(text, isBlock) {
  const holder = document.createElement("span");
  holder.className = "formula";
  if (isBlock) holder.tabIndex = 0; // it may be wider than the screen
  try {
    katex.render(text, holder, { displayMode: isBlock, maxSize: 20, maxExpand: 200, strict: "ignore" });
  } catch (error) {
    if (error instanceof katex.ParseError) return null;
    throw error;
  }
  return holder;
}

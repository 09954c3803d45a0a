// What a model writes, as HTML that can do no harm: no scripts, styles, forms, and nothing that loads by itself.

import DOMPurify from "/static/vendor/purify.js";
import { dressMath, extensions } from "/static/math.js";
import { marked } from "/static/vendor/marked.js";

marked.use({ gfm: true, breaks: true, async: false, extensions });

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a", "h1", "h2", "h3", "h4",
    "h5", "h6", "table", "thead", "tbody", "tr", "th", "td", "sub", "sup", "kbd", "mark", "u", "small", "details", "summary",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

export function markdown(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const one of fragment.querySelectorAll("[class]")) {
    if (one.nodeName !== "CODE" || !/^(language-[\w+#.-]{1,24}|math-block|math-inline)$/.test(one.className)) one.removeAttribute("class");
  }
  dressMath(fragment);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of fragment.querySelectorAll("pre")) block.tabIndex = 0; // it may be wider than the screen
  return fragment;
}

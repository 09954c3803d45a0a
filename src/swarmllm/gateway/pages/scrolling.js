// Scrolling in a conversation: follow an answer while its end is visible; a button leads back to the end.

const byId = (id) => document.getElementById(id);
const scroll = byId("scroll");
const NEAR = 80;

export const isAtEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR;

export function toEnd() {
  scroll.scrollTop = scroll.scrollHeight;
}

const show = () => (byId("to-end").hidden = isAtEnd());
scroll.addEventListener("scroll", show, { passive: true });
new ResizeObserver(show).observe(byId("messages"));
new ResizeObserver(show).observe(scroll);
byId("to-end").addEventListener("click", () => {
  toEnd();
  byId("text").focus();
});

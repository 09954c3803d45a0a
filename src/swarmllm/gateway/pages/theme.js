// Light or dark: as the system has it, until the user chooses. Loaded before anything is drawn.

const KEY = "swarmllm.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage may be forbidden
  }
}

function show() {
  document.documentElement.dataset.theme = chosen() ?? (system.matches ? "dark" : "light");
}

show();
system.addEventListener("change", show);
addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme")?.addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      if ((system.matches ? "dark" : "light") === next) localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, next);
    } catch {
      // then it holds until the page is left
    }
    document.documentElement.dataset.theme = next;
  });
});

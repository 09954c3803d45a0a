// The key of the machines' page. `swarmllm up` prints it as the fragment of the page's address. It stays in this browser.

const KEY = "swarmllm.page_key";
let known = null; // where storage is forbidden, it holds until the page is left

function take() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!given) return;
  history.replaceState(null, "", location.pathname + location.search); // not for bookmarks and shoulders
  known = given;
  try {
    localStorage.setItem(KEY, given);
  } catch {
    // see `known`
  }
}

export function pageKey() {
  try {
    return localStorage.getItem(KEY) ?? known;
  } catch {
    return known;
  }
}

export function forgetKey() {
  known = null;
  try {
    localStorage.removeItem(KEY);
  } catch {
    // there was none
  }
}

take();
addEventListener("hashchange", take);

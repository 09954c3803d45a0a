// The list of models in a page's head, if there are several.

export function showChoice(names, chosen) {
  const list = document.getElementById("models");
  list.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
  list.hidden = names.length < 2;
  document.getElementById("model").classList.toggle("only-read", names.length > 1); // a page has a heading
}

// Files for the next message: pasted, dropped or chosen. Pictures are made smaller,
// text files are read; nothing else can be attached.

import { model } from "/static/head.js";

const byId = (id) => document.getElementById(id);
const row = byId("attached");
const LONGEST = 1024; // pixels of a side: models use fewer, and a request has 1 MiB
const MOST_PICTURES = 4;
const MOST_FILES = 8;
const MOST_BYTES = 1 << 20; // of a text file

let pictures = []; // data URLs
let files = []; // {name, text}
let changed = () => {};

// `listener()` is called when something is attached or removed.
export function onAttached(listener) {
  changed = listener;
}

// ---------------------------------------------------------------- text of a message

function fenced({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

// The text, with its text files in front.
export const textOf = (message) => [...(message.files ?? []).map(fenced), message.content].filter(Boolean).join("\n\n");

// The content for the API.
export function asSaid(message) {
  const { role, pictures } = message;
  if (!pictures?.length) return { role, content: textOf(message) };
  const seen = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: [...seen, { type: "text", text: textOf(message) }] };
}

// ---------------------------------------------------------------- elements

function removal(what, onRemove) {
  const remove = document.createElement("button");
  remove.type = "button";
  remove.className = "button icon";
  remove.textContent = "×";
  remove.setAttribute("aria-label", `Remove ${what}`);
  remove.addEventListener("click", onRemove);
  return remove;
}

function rowOf(name, things, element) {
  if (!things?.length) return null;
  const found = document.createElement("div");
  found.className = name;
  found.append(...things.map(element));
  return found;
}

// The pictures of a message as an element; null if it has none.
export function pictureRow(urls, onRemove) {
  return rowOf("pictures", urls, (url, place) => {
    const frame = document.createElement("span");
    const image = document.createElement("img");
    image.src = url;
    image.alt = `Picture ${place + 1}`;
    frame.append(image);
    if (onRemove) frame.append(removal(`picture ${place + 1}`, () => onRemove(place)));
    return frame;
  });
}

// The text files of a message as an element; null if it has none.
export function fileRow(files, onRemove) {
  return rowOf("files", files, ({ name, text }, place) => {
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = name;
    const content = document.createElement("pre");
    content.tabIndex = 0;
    content.textContent = text;
    details.append(summary, content);
    if (!onRemove) return details;
    const frame = document.createElement("span");
    frame.append(details, removal(name, () => onRemove(place)));
    return frame;
  });
}

// ---------------------------------------------------------------- attached now

// Take the files for a message that is being sent; none are attached afterwards.
export function takeAttached() {
  const taken = attached();
  putAttached({});
  return taken;
}

// The files as fields of a message.
export function attached() {
  return { ...(pictures.length && { pictures }), ...(files.length && { files }) };
}

export function putAttached(message) {
  [pictures, files] = [[...(message.pictures ?? [])], [...(message.files ?? [])]];
  const without = (list, place) => list.filter((_, index) => index !== place);
  const drop = (change) => {
    putAttached({ pictures, files, ...change });
    byId("text").focus();
  };
  const rows = [
    pictureRow(pictures, (place) => drop({ pictures: without(pictures, place) })),
    fileRow(files, (place) => drop({ files: without(files, place) })),
  ];
  row.replaceChildren(...rows.filter(Boolean));
  changed();
}

// Name on the button what can be attached: pictures only for models with vision.
export function showAttach() {
  byId("attach").setAttribute("aria-label", model?.vision ? "Attach a picture or a text file" : "Attach a text file");
}

async function attach(chosen) {
  tell("");
  for (const file of chosen) {
    try {
      if (file.type.startsWith("image/") && file.type !== "image/svg+xml") await attachPicture(file);
      else await attachText(file);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      tell(error.message);
      break;
    }
  }
}

class Refused extends Error {}

async function attachPicture(file) {
  if (!model?.vision) throw new Refused(`${model?.id ?? "This model"} reads text only, so it can’t be shown pictures.`);
  if (pictures.length >= MOST_PICTURES) throw new Refused(`A message can have ${MOST_PICTURES} pictures.`);
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Refused(`${file.name || "This"} is no picture that this browser can read.`);
  });
  putAttached({ pictures: [...pictures, smaller(bitmap)], files });
}

async function attachText(file) {
  if (files.length >= MOST_FILES) throw new Refused(`A message can have ${MOST_FILES} text files.`);
  if (file.size > MOST_BYTES) throw new Refused(`${file.name} is larger than 1 MiB: attach a part of it.`);
  const text = decoded(new Uint8Array(await file.arrayBuffer()));
  if (text === null) throw new Refused(`${file.name} is no text file. Save it as text in UTF-8, or paste what it says.`);
  putAttached({ pictures, files: [...files, { name: file.name, text }] });
}

// Decode UTF-8, or UTF-16 with a byte order mark; null: it is neither.
function decoded(bytes) {
  const mark = (bytes[0] << 8) | bytes[1];
  const encoding = mark === 0xfffe ? "utf-16le" : mark === 0xfeff ? "utf-16be" : "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text.replaceAll("\r\n", "\n");
  } catch {
    return null;
  }
}

// Small pictures stay unchanged; others become JPEG.
function smaller(bitmap) {
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const exact = canvas.toDataURL("image/png");
  return scale === 1 && exact.length < 1 << 17 ? exact : canvas.toDataURL("image/jpeg", 0.85);
}

function tell(words) {
  byId("unseen").textContent = words;
}

byId("text").addEventListener("paste", (event) => {
  const pasted = [...(event.clipboardData?.files ?? [])];
  const hasText = event.clipboardData?.types.includes("text/plain"); // then files are other forms of the same text
  if (!pasted.length || (hasText && !pasted.some((file) => file.type.startsWith("image/")))) return;
  event.preventDefault();
  attach(pasted);
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault(); // or the browser would leave the page for the file
    if (name === "drop") attach([...event.dataTransfer.files]);
  });
}
byId("attach").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", () => {
  attach([...byId("file").files]);
  byId("file").value = "";
});

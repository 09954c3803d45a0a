// Pictures beside the message box: pasted, dropped or chosen, made smaller, shown, and sent with the next message.

import { model } from "/static/head.js";

const byId = (id) => document.getElementById(id);
const row = byId("pictures");
const LONGEST = 1024; // pixels of a side: models look at fewer, and a request has 1 MiB
const MOST = 4;

let pictures = []; // data URLs

// What a message says, as the API takes it.
export function asSaid({ role, content, pictures }) {
  if (!pictures?.length) return { role, content };
  const seen = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: [...seen, { type: "text", text: content }] };
}

// The pictures of a message as an element; null if it has none.
export function pictureRow(urls, onRemove) {
  if (!urls?.length) return null;
  const found = document.createElement("div");
  found.className = "pictures";
  urls.forEach((url, place) => {
    const frame = document.createElement("span");
    const image = document.createElement("img");
    image.src = url;
    image.alt = `Picture ${place + 1}`;
    frame.append(image);
    if (onRemove) {
      const remove = document.createElement("button");
      remove.type = "button";
      remove.className = "button icon";
      remove.textContent = "×";
      remove.setAttribute("aria-label", `Remove picture ${place + 1}`);
      remove.addEventListener("click", () => onRemove(place));
      frame.append(remove);
    }
    found.append(frame);
  });
  return found;
}

// Those that are attached, for a message that is being sent; none are afterwards.
export function takePictures() {
  const taken = pictures;
  putPictures([]);
  return taken.length ? { pictures: taken } : {};
}

export function putPictures(urls) {
  pictures = [...(urls ?? [])];
  row.replaceChildren(...[pictureRow(pictures, drop)].filter(Boolean));
}

// Whether the model that answers sees, the button says.
export function showAttach() {
  byId("attach").hidden = !model?.sees;
}

function drop(place) {
  putPictures(pictures.filter((_, index) => index !== place));
  byId("text").focus();
}

async function attach(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  if (!images.length) return;
  if (!model?.sees) {
    tell(`${model?.id ?? "This model"} reads text only, so it can’t be shown pictures.`);
    return;
  }
  tell("");
  for (const file of images) {
    if (pictures.length >= MOST) {
      tell(`A message can have ${MOST} pictures.`);
      break;
    }
    try {
      putPictures([...pictures, await smaller(file)]);
    } catch {
      tell(`${file.name || "This"} is no picture that this browser can read.`);
    }
  }
}

// Small pictures stay as they are, point by point; others become JPEG.
async function smaller(file) {
  const bitmap = await createImageBitmap(file);
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
  const files = [...(event.clipboardData?.files ?? [])];
  if (!files.some((file) => file.type.startsWith("image/"))) return;
  event.preventDefault();
  attach(files);
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault(); // or the browser would leave the page for the picture
    if (name === "drop") attach(event.dataTransfer.files);
  });
}
byId("attach").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", () => {
  attach(byId("file").files);
  byId("file").value = "";
});

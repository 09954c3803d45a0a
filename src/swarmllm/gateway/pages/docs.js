// The API's page: /openapi.json as tables.

const holder = document.getElementById("operations");
const status = document.getElementById("status");

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  const some = schema.anyOf ?? schema.oneOf;
  if (some) return [...new Set(some.map(kind).filter((one) => one !== "null"))].join(" | ");
  if (schema.type === "array") return `[${schema.items ? kind(schema.items) : ""}, …]`;
  return schema.type ?? "any";
}

function limits(schema) {
  const names = { minimum: "≥", maximum: "≤", exclusiveMinimum: ">", exclusiveMaximum: "<" };
  const holders = [schema, ...(schema.anyOf ?? [])];
  return holders.flatMap((one) => Object.entries(names).filter(([name]) => one[name] !== undefined).map(([name, sign]) => `${sign} ${one[name]}`)).join(", ");
}

function table(schema) {
  const wide = make("div", undefined, "wide");
  wide.tabIndex = 0;
  wide.setAttribute("role", "region");
  wide.setAttribute("aria-label", `Fields of ${schema.title}`);
  const found = make("table");
  found.createTHead().insertRow().append(...["Field", "Type", "Meaning"].map((title) => Object.assign(make("th", title), { scope: "col" })));
  const body = found.createTBody();
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const row = body.insertRow();
    row.insertCell().append(make("code", name));
    row.insertCell().append(make("code", kind(field)));
    const needed = schema.required?.includes(name) ? "needed" : "";
    row.insertCell().textContent = [needed, limits(field), field.description].filter(Boolean).join("; ");
  }
  wide.append(found);
  return wide;
}

// Schemas of a request's body and of the objects in it.
function schemas(name, all, seen = new Set()) {
  if (seen.has(name) || !all[name]) return [];
  seen.add(name);
  const parts = JSON.stringify(all[name]).matchAll(/#\/components\/schemas\/([\w-]+)/g);
  return [name, ...[...parts].flatMap(([, part]) => schemas(part, all, seen))];
}

function operation(path, method, about, all) {
  const details = make("details");
  const summary = make("summary");
  summary.append(make("span", method.toUpperCase(), "method"), make("code", path), make("span", about.summary, "what"));
  details.append(summary);
  const [type, { schema: body } = {}] = Object.entries(about.requestBody?.content ?? {})[0] ?? [];
  const given = type === "multipart/form-data" ? "-F file=@sound.wav -F …" : `-H 'Content-Type: ${type}' -d '{…}'`;
  const data = body ? ` \\\n     ${given}` : "";
  details.append(make("pre", `curl ${method === "get" || body ? "" : `-X ${method.toUpperCase()} `}${location.origin}${path}${data}`));
  details.lastChild.tabIndex = 0;
  for (const name of body ? schemas(kind(body), all) : []) {
    if (all[name].properties) details.append(make("h2", name), table(all[name]));
  }
  details.append(make("h2", "Answers"));
  const answers = make("ul");
  for (const [code, one] of Object.entries(about.responses)) answers.append(make("li", `${code}: ${one.description}`));
  details.append(answers);
  return details;
}

try {
  const document = await (await fetch("/openapi.json")).json();
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, about] of Object.entries(methods)) holder.append(operation(path, method, about, document.components.schemas));
  }
  status.textContent = "A field that isn’t listed is refused by its name.";
} catch {
  status.textContent = "The gateway can’t be reached.";
}

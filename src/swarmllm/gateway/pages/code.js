// Code in answers: names the language, adds a button to copy, and colours words common to many languages.

const WORDS = new Set(
  ("and as assert async await break case catch class const continue def default delete do elif else enum except export extends " +
    "false finally fn for from func function if impl import in interface is lambda let match mod module mut new nil none not null " +
    "or package pass private public pub raise return select self static struct super switch this throw trait true try type " +
    "use var void where while with yield then fi done esac echo end begin int float str bool char string double long").split(" "),
);
const PARTS = /(\/\/[^\n]*|#[^\n]*|--[^\n]*|\/\*[^]*?\*\/)|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|\b(\d[\w.]*)\b|\b([A-Za-z_]\w*)\b/g;
const HASH_IS_NO_COMMENT = new Set(["js", "javascript", "ts", "typescript", "c", "cpp", "rust", "java", "go", "css", "html", "json"]);
const PLAIN = new Set(["", "text", "txt", "plain", "markdown", "md"]);
const MOST = 20000; // longer code stays uncoloured

function coloured(text, language) {
  const found = document.createDocumentFragment();
  let place = 0;
  for (const match of text.matchAll(PARTS)) {
    const [whole, comment, string, number, word] = match;
    if (comment?.startsWith("#") && HASH_IS_NO_COMMENT.has(language)) continue;
    if (comment?.startsWith("--") && !["sql", "lua", "haskell"].includes(language)) continue;
    const kind = comment ? "comment" : string ? "string" : number ? "number" : WORDS.has(word?.toLowerCase()) ? "word" : null;
    if (!kind) continue;
    found.append(text.slice(place, match.index));
    const span = document.createElement("span");
    span.className = `code-${kind}`;
    span.textContent = whole;
    found.append(span);
    place = match.index + whole.length;
  }
  found.append(text.slice(place));
  return found;
}

export function dressCode(body, makeCopyButton) {
  for (const block of body.querySelectorAll("pre")) {
    const code = block.querySelector("code");
    if (!code) continue;
    const language = /language-([\w+#.-]{1,24})/.exec(code.className)?.[1].toLowerCase() ?? "";
    if (!PLAIN.has(language) && code.textContent.length < MOST) code.replaceChildren(coloured(code.textContent, language));
    const top = document.createElement("div");
    top.className = "code-top";
    const label = document.createElement("span");
    label.textContent = language || "text";
    top.append(label, makeCopyButton((button) => button.closest("pre").querySelector("code").textContent));
    block.prepend(top);
  }
}

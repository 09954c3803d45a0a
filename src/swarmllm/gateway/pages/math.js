// Formulas as MathML: what models write most of LaTeX. What isn't known stays as it was written.

const NS = "http://www.w3.org/1998/Math/MathML";
const SIGNS = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ", iota: "ι", kappa: "κ",
  lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", pi: "π", rho: "ρ", sigma: "σ", tau: "τ", phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω",
  Gamma: "Γ", Delta: "Δ", Theta: "Θ", Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Phi: "Φ", Psi: "Ψ", Omega: "Ω", ell: "ℓ", hbar: "ℏ", infty: "∞",
  emptyset: "∅", nabla: "∇", partial: "∂",
};
const OPERATORS = {
  cdot: "⋅", times: "×", div: "÷", pm: "±", mp: "∓", le: "≤", leq: "≤", ge: "≥", geq: "≥", ne: "≠", neq: "≠", approx: "≈", equiv: "≡", sim: "∼",
  to: "→", rightarrow: "→", leftarrow: "←", Rightarrow: "⇒", implies: "⟹", iff: "⟺", in: "∈", notin: "∉", subset: "⊂", subseteq: "⊆", cup: "∪",
  cap: "∩", forall: "∀", exists: "∃", neg: "¬", land: "∧", lor: "∨", sum: "∑", prod: "∏", int: "∫", ldots: "…", dots: "…", cdots: "⋯", mid: "∣",
  langle: "⟨", rangle: "⟩", lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉", quad: "\u2003", ",": "\u2009", ";": "\u2005", " ": " ", "!": "", "{": "{",
  "}": "}", "|": "‖", "%": "%", "&": "&", "\\": " ",
};
const NAMES = new Set(["sin", "cos", "tan", "log", "ln", "exp", "max", "min", "lim", "det", "gcd", "arg", "sup", "inf", "mod"]);
const SETS = { R: "ℝ", N: "ℕ", Z: "ℤ", Q: "ℚ", C: "ℂ", E: "𝔼", P: "ℙ" };
const HATS = { hat: "^", bar: "¯", vec: "→", tilde: "~", dot: "˙", overline: "¯" };
const MOST = 4000;

function make(tag, ...children) {
  const element = document.createElementNS(NS, tag);
  element.append(...children);
  return element;
}

class Unknown extends Error {}

class Parser {
  constructor(text) {
    this.tokens = text.match(/\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\s+|[^]/g) ?? [];
    this.place = 0;
    this.depth = 0;
  }

  peek() {
    while (/^\s+$/.test(this.tokens[this.place] ?? "")) this.place += 1;
    return this.tokens[this.place];
  }

  row(end) {
    if ((this.depth += 1) > 30) throw new Unknown();
    const found = [];
    for (;;) {
      const token = this.peek();
      if (token === undefined) {
        if (end) throw new Unknown();
        break;
      }
      if (token === end) {
        this.place += 1;
        break;
      }
      found.push(this.withScripts());
    }
    this.depth -= 1;
    return make("mrow", ...found);
  }

  withScripts() {
    const base = this.atom();
    const scripts = {};
    while (this.peek() === "^" || this.peek() === "_") {
      const which = this.tokens[this.place];
      this.place += 1;
      scripts[which] = this.atom();
    }
    const isBig = /^[∑∏]$|^(lim|max|min)$/.test(base.textContent);
    if (scripts._ && scripts["^"]) return make(isBig ? "munderover" : "msubsup", base, scripts._, scripts["^"]);
    if (scripts._) return make(isBig ? "munder" : "msub", base, scripts._);
    return scripts["^"] ? make(isBig ? "mover" : "msup", base, scripts["^"]) : base;
  }

  atom() {
    const token = this.peek();
    this.place += 1;
    if (token === undefined || token === "}" || token === "^" || token === "_" || token === "&") throw new Unknown();
    if (token === "{") return this.row("}");
    if (/^\d/.test(token)) return make("mn", token);
    if (/^\p{L}$/u.test(token)) return make("mi", token);
    if (!token.startsWith("\\")) return make("mo", token === "-" ? "−" : token);
    return this.command(token.slice(1));
  }

  command(name) {
    if (SIGNS[name]) return make("mi", SIGNS[name]);
    if (name in OPERATORS) return make("mo", OPERATORS[name]);
    if (NAMES.has(name)) return make("mi", name);
    if (name === "frac" || name === "dfrac" || name === "tfrac") return make("mfrac", this.atom(), this.atom());
    if (name === "sqrt") return make("msqrt", this.atom());
    if (name === "mathbb") {
      const inner = this.atom();
      return make("mi", SETS[inner.textContent] ?? inner.textContent);
    }
    if (["text", "mathrm", "operatorname", "mathbf", "boxed", "textbf", "mathcal"].includes(name)) return this.text();
    if (name === "left" || name === "right" || /^(big|Big)/.test(name)) return this.peek() === "." ? (this.place++, make("mrow")) : this.atom();
    if (HATS[name]) return make("mover", this.atom(), make("mo", HATS[name]));
    throw new Unknown();
  }

  text() {
    if (this.peek() !== "{") return this.atom();
    let text = "";
    for (this.place += 1; this.tokens[this.place] !== "}"; this.place += 1) {
      if (this.tokens[this.place] === undefined) throw new Unknown();
      text += this.tokens[this.place];
    }
    this.place += 1;
    return make("mtext", text);
  }
}

// The formula, or null if it has something that isn't known here.
export function formula(text, isBlock) {
  if (text.length > MOST) return null;
  try {
    const math = make("math", new Parser(text).row());
    if (isBlock) math.setAttribute("display", "block");
    math.setAttribute("aria-label", text);
    return math;
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

const inline = /^\\\((.+?)\\\)|^\$(?![\s$])([^$\n]*?[^\s$\\])\$(?!\d)/;
const block = /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])(?:\n|$)?/;
const escaped = (text) => text.replace(/[&<>]/g, (sign) => `&#${sign.charCodeAt(0)};`);

function extension(name, level, rule, start) {
  return {
    name,
    level,
    start: (text) => text.match(start)?.index,
    tokenizer(text) {
      const found = rule.exec(text);
      return found ? { type: name, raw: found[0], text: (found[1] ?? found[2]).trim() } : undefined;
    },
    renderer: ({ raw, text }) => `<code class="${name}" title="${escaped(raw).replaceAll('"', "&#34;")}">${escaped(text)}</code>`,
  };
}

export const extensions = [
  extension("math-block", "block", block, /\$\$|\\\[/),
  extension("math-inline", "inline", inline, /\$|\\\(/),
];

// Formulas in place of what `extensions` have left for them.
export function dressMath(body) {
  for (const code of body.querySelectorAll("code.math-block, code.math-inline")) {
    const math = formula(code.textContent, code.className === "math-block");
    code.replaceWith(math ?? code.title);
  }
}
